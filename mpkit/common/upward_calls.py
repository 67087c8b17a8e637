"""Code that lies in a room above its caller: `Run.what_if` starts a Cluster, whose trainings are Runs.

The caller imports nothing: the function is found by name in a table, as views are (`mpkit.views.renderers`), when it
is called.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["METHODS", "provide_method"]

METHODS = {
    "ExpertLoad.balance": "mpkit.prediction.experts.expert_balance:balance_load",
    "Plan.read": "mpkit.plan.formats.read:read",
    "Plan.to": "mpkit.plan.formats.write:write",
    "Plan.placement": "mpkit.strategies.placement.placement:placement",
    "Run.what_if": "mpkit.prediction.what_if:what_if",
    "Timeline.diagnose": "mpkit.timeline.diagnosis.rules:diagnose",
}
"""By the name of the method, or of the function that calls it: the module and the name of its function."""


def provide_method(method: str) -> Callable[..., Any]:
    """Return the function of a method.

    >>> provide_method("Run.what_if").__module__
    'mpkit.prediction.what_if'
    """
    module, _, name = METHODS[method].partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function
