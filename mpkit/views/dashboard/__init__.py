"""A running training: its losses, its timeline and its memory, live."""
