"""Two wheels for an exam: mpkit whose exercises have no solutions, and mpkit-solutions, which has them."""
