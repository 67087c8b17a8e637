"""Watching a program that was not written for mpkit: what it computes, communicates and holds becomes a Trace."""
