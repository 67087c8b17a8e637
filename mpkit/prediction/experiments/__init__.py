"""Comparisons of several runs, and reproductions of experiments from the literature.

scaling, memory_by_strategy        trainings that they start themselves, by ranks and by strategy
compare_bubbles, compare_memory    runs that exist already
hugging_face                       the guide's three configurations
soap_...                           one layer split by sample, operator, attribute and parameter
operators_at_once                  a layer norm's mean and standard deviation on two ranks at the same time

The functions are imported when they are first used, since some of them work without PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpkit.common.missing_packages import lacks_torch, needs_torch
from mpkit.common.tracebacks import public

if TYPE_CHECKING:
    from mpkit.prediction.experiments.compare_bubbles import bubble_curve as bubble_curve
    from mpkit.prediction.experiments.compare_memory import memory_by_plan as memory_by_plan
    from mpkit.prediction.experiments.hugging_face import hf_experiment as hf_experiment
    from mpkit.prediction.experiments.operators_at_once import mean_and_std_at_once as mean_and_std_at_once
    from mpkit.prediction.experiments.soap_splits import soap as soap

HOMES = {
    "bubble_curve": "compare_bubbles",
    "hf_experiment": "hugging_face",
    "mean_and_std_at_once": "operators_at_once",
    "memory_by_plan": "compare_memory",
    "soap": "soap_splits",
}
"""The module of each function."""

__all__ = list(HOMES)


@public
def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'mk.experiments' has no attribute {name!r}; it has {', '.join(HOMES)}")
    try:
        return vars(import_module(f"{__name__}.{HOMES[name]}"))[name]
    except ModuleNotFoundError as error:
        if not lacks_torch(error):
            raise
        raise needs_torch(f"mk.experiments.{name}") from None
