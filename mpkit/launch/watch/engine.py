"""Every backward of a program: `torch.autograd`'s one way into its engine, whoever takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.autograd
import torch.autograd.graph

from mpkit.common.patches import Replacements
from mpkit.common.torch_private import current

__all__ = ["EngineRuns"]


class EngineRuns:
    """The runs of autograd's engine.

    Args:
        begins: called before each run, with the tensors from which it starts.
        ends: called after each run, also after one that raised.
    """

    def __init__(self, begins: Callable[[Any], None], ends: Callable[[], None]) -> None:
        self._begins, self._ends = begins, ends
        self._replaced = Replacements()

    def install(self) -> None:
        """Begin to see backwards."""
        run, begins, ends = current("_engine_run_backward"), self._begins, self._ends

        def engine_run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            begins(outputs)
            try:
                return run(outputs, *args, **kwargs)
            finally:
                ends()

        for module in (torch.autograd, torch.autograd.graph):
            self._replaced.put(module, "_engine_run_backward", engine_run_backward)

    def uninstall(self) -> None:
        """Leave backwards as they were."""
        self._replaced.restore()
