"""A second forward: it starts from the buffers and attributes that the first one started from, and changes none.

    first     what the forward starts from is taken down, with clones of the tensors into which earlier forwards wrote;
              the first time, nobody knows these yet, and all are cloned while it runs
    second    the module works on what was taken down, and gets back afterwards what it had

So running means are not updated twice, a counter has the number that the first forward had, and a list to which the
forward appends does not get each item twice.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from mpkit.errors import MpkitError

__all__ = ["SecondForward", "StartingPoint"]

INTERNAL = {*vars(nn.Module()), "forward"}
"""Attributes of every module, which a forward does not change."""


class SecondForward:
    """The forwards of a module that are done twice.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._written: set[nn.Module] | None = (
            None  # those that write into their tensors; None: not known yet
        )

    @contextmanager
    def first(self) -> Iterator[StartingPoint]:
        """Return where the forward inside the block starts from.

        Raises:
            MpkitError: it wrote into a tensor into which the first forward of all had not written.
        """
        start = StartingPoint(self.module, self._written)
        yield start
        written = start.written_modules()
        if self._written is None:
            self._written = written
            start.keep(written)
        elif late := written - self._written:
            name = next(name for name, each in self.module.named_modules() if each in late)
            raise MpkitError(
                f"{name or type(self.module).__name__} wrote into a buffer into which it had not written before, and "
                "recompute= needs the value that was there. Write into it in the first forward too, or keep all "
                "activations, Plan(recompute='none')"
            )


class StartingPoint:
    """The buffers and attributes of a module when a forward began.

    Args:
        module: the module.
        written: modules within it whose tensors are cloned; None for all.
    """

    def __init__(self, module: nn.Module, written: Collection[nn.Module] | None) -> None:
        self._states = {
            each: _copy_containers((each._buffers, _attributes(each)), {}) for each in module.modules()
        }
        self._versions = {each: [(t, t._version) for t in _tensors(s)] for each, s in self._states.items()}
        cloned = self._versions if written is None else written
        self._clones = {id(t): t.clone() for each in cloned for t, _ in self._versions[each]}

    def written_modules(self) -> set[nn.Module]:
        """Return the modules that have written into their tensors since."""
        return {e for e, tensors in self._versions.items() if any(t._version != v for t, v in tensors)}

    def keep(self, written: Collection[nn.Module]) -> None:
        """Keep clones of these modules' tensors only."""
        kept = {id(t) for each in written for t, _ in self._versions[each]}
        self._clones = {number: clone for number, clone in self._clones.items() if number in kept}

    @contextmanager
    def begin_again(self) -> Iterator[None]:
        """Let the module work on copies of what was there; afterwards it has again what it has now."""
        now = {each: (dict(each._buffers), _attributes(each)) for each in self._states}
        for each, state in self._states.items():
            _put(each, _copy_containers(state, self._clones))
        try:
            yield
        finally:
            for each, state in now.items():
                _put(each, state)


def _put(module: nn.Module, state: Any) -> None:
    buffers, attributes = state
    module._buffers.update(buffers)
    for name in _attributes(module).keys() - attributes.keys():
        del vars(module)[name]
    vars(module).update(attributes)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a module may change in its forward; torch's own have none."""
    if type(module).__module__.startswith("torch.nn."):
        return {}
    return {name: value for name, value in vars(module).items() if name not in INTERNAL}


def _copy_containers(value: Any, clones: Mapping[int, Tensor]) -> Any:
    """Return a copy of the containers in a value, with clones in the places of tensors."""
    if isinstance(value, Tensor):
        return clones.get(id(value), value)
    if type(value) in (list, tuple, set, deque):
        return type(value)(_copy_containers(part, clones) for part in value)
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update((key, _copy_containers(part, clones)) for key, part in value.items())
        return copied
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value's containers that a forward may write into."""
    if isinstance(value, Tensor):
        if not value.requires_grad:
            yield value
    elif isinstance(value, (list, tuple, set, deque, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
