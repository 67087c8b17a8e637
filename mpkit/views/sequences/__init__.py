"""Pictures of sequences that ranks share."""
