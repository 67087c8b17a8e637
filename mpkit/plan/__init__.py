"""Plans: which parallel strategies run on how many ranks, and which combinations are impossible."""
