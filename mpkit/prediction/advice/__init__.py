"""Advice: which plan, with reasons."""
