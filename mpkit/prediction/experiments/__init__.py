"""Comparisons of several runs.

scaling, memory_by_strategy    trainings that they start themselves, by ranks and by strategy
compare                        runs that exist already
profile, measured_times        a model measured on this machine, and plans predicted from that
factors                        what trainings that are played count, and how far it is off
"""

from typing import Any

from mpkit.common.tracebacks import public
from mpkit.prediction.experiments.compare import bubble_curve, memory_by_plan

__all__ = ["bubble_curve", "memory_by_plan"]

NOW = {
    "hf_experiment": "from examples.hugging_face import hf_experiment",
    "mean_and_std_at_once": "from examples.flexflow import mean_and_std_at_once",
    "soap": "from examples.flexflow import soap",
}
"""Functions that are examples of the repository now, and how they are imported in its folder."""


@public
def __getattr__(name: str) -> Any:
    now = f"in the repository: {NOW[name]}" if name in NOW else f"it has {', '.join(__all__)}"
    raise AttributeError(f"module 'mk.experiments' has no attribute {name!r}; {now}")
