"""Drawings of a placement: which rank holds what."""
