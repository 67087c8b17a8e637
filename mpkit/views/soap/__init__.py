"""Drawings of one layer split by sample, operator, attribute and parameter."""
