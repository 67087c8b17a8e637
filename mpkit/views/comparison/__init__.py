"""Drawings that compare timelines and runs."""
