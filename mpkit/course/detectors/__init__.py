"""How wrong results are related to the right ones."""
