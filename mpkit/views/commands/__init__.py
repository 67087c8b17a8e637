"""The commands that print or draw: what `mpkit demo`, `open`, `estimate` and the others do with their arguments."""
