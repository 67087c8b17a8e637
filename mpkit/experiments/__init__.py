"""Experiments of the literature, played again."""
