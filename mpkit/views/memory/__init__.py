"""Drawings of memory: over time by category, and by strategy."""
