"""Timelines as one HTML page that needs nothing else, and the schedules that readers of it may try."""
