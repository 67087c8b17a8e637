"""Search for schedules: a greedy order, improved by moving actions."""
