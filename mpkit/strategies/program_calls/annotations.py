"""What a program says it is doing: `torch.profiler.record_function`, which FSDP2, DDP and optimizers use as well."""

from __future__ import annotations

from typing import Any

from torch.autograd.profiler import record_function

from mpkit.common.process_wide import Replacements

__all__ = ["Annotations"]


class Annotations:
    """The annotations that are open, one within another.

    Attributes:
        innermost: the name of the innermost one, "" outside of all.
    """

    def __init__(self) -> None:
        self.innermost = ""
        self._around: list[str] = []
        self._replaced = Replacements()

    def install(self) -> None:
        """Begin to see annotations."""
        before_enter: Any = record_function.__enter__
        before_exit: Any = record_function.__exit__
        around = self._around

        def enter(annotation: Any) -> Any:
            around.append(self.innermost)
            self.innermost = annotation.name
            return before_enter(annotation)

        def leave(annotation: Any, *error: Any) -> None:
            self.innermost = around.pop() if around else ""
            before_exit(annotation, *error)

        self._replaced.put(record_function, "__enter__", enter)
        self._replaced.put(record_function, "__exit__", leave)

    def uninstall(self) -> None:
        """Leave annotations as they were."""
        self._replaced.restore()
