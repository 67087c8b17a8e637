"""Comparisons of several runs.

scaling, memory_by_strategy    trainings that they start themselves, by ranks and by strategy
compare                        runs that exist already
profile                        a model measured on this machine, and plans predicted from that
what_if                        a run's step after changes
factors                        what trainings that are played count, and how far that is off
"""

from mpkit.prediction.experiments.compare import bubble_curve, memory_by_plan

__all__ = ["bubble_curve", "memory_by_plan"]
