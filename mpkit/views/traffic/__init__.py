"""Drawings of traffic: which rank sends how much to which."""
