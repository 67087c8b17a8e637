"""Methods whose code lies in a layer above their class: `Run.what_if` starts a Cluster, whose trainings are Runs.

The class imports nothing: the function is found by the method's name in a table, as views are
(`mpkit.views.renderers`), when the method is called.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["METHODS", "provide_method"]

METHODS = {
    "Run.what_if": "mpkit.experiments.what_if:what_if",
    "Timeline.diagnose": "mpkit.diagnosis.rules:diagnose",
}
"""By the name of a method: the module and the name of its function."""


def provide_method(method: str) -> Callable[..., Any]:
    """Return the function of a method.

    >>> provide_method("Run.what_if").__module__
    'mpkit.experiments.what_if'
    """
    module, _, name = METHODS[method].partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function
