"""Comparisons of several runs, and runs or models measured once and played again after changes."""

from mpkit.prediction.experiments.compare import bubble_curve, memory_by_plan

__all__ = ["bubble_curve", "memory_by_plan"]
