"""Rules over the facts, one subject per module: each yields findings, and all are listed in `rules`."""
