"""Where a recomputed call starts: random states, autocast, buffers and attributes, as the first run found them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.errors import MpkitError
from mpkit.strategies.models.own_draws import OwnDraws
from mpkit.strategies.models.randomness import RandomState, preserve_random_state

__all__ = ["Setting", "StartingPoint", "WrittenState"]

INTERNAL = {*vars(nn.Module()), "forward"}
"""Attributes of every module, which a forward does not change."""


@dataclass
class Setting:
    """Random states and autocast, as a forward found them."""

    random: RandomState
    device: torch.device
    cast: tuple[bool, torch.dtype]
    draws: OwnDraws

    def __post_init__(self) -> None:
        self._spans = self.draws.keep()

    @classmethod
    def now(cls, tensors: list[Tensor], draws: OwnDraws) -> Setting:
        """Return the current setting, on the device of these tensors."""
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        cast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        return cls(RandomState.now(device), device, cast, draws)

    @contextmanager
    def restore(self) -> Iterator[None]:
        """Restore the setting inside the block."""
        with preserve_random_state(self.device):
            self.random.restore()
            with (
                torch.autocast(self.device.type, self.cast[1], self.cast[0]),
                self.draws.reenter_spans(self._spans),
            ):
                yield


class WrittenState:
    """What the forwards of a module that run twice write into: its buffers, and attributes that it sets."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._written: set[nn.Module] | None = None  # those that write into buffers; None: not known yet

    @contextmanager
    def first(self) -> Iterator[StartingPoint]:
        """Return where the forward inside the block starts from."""
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
        written: modules within it whose buffers are cloned; None for all.
    """

    def __init__(self, module: nn.Module, written: Collection[nn.Module] | None) -> None:
        self._attributes = {
            each: {name: _copy_container(value) for name, value in _attributes(each).items()}
            for each in module.modules()
        }
        self._buffers = {each: dict(each._buffers) for each in self._attributes}
        self._versions = {
            each: [(buffer, buffer._version) for buffer in buffers.values() if buffer is not None]
            for each, buffers in self._buffers.items()
        }
        cloned = self._versions if written is None else written
        self._clones = {buffer: buffer.clone() for each in cloned for buffer, _ in self._versions[each]}

    def written_modules(self) -> set[nn.Module]:
        """Return the modules that have written into their buffers since."""
        return {each for each, buffers in self._versions.items() if any(b._version != v for b, v in buffers)}

    def keep(self, written: Collection[nn.Module]) -> None:
        """Keep clones of these modules' buffers only."""
        kept = {buffer for each in written for buffer, _ in self._versions[each]}
        self._clones = {buffer: clone for buffer, clone in self._clones.items() if buffer in kept}

    @contextmanager
    def begin_again(self) -> Iterator[None]:
        """Let the module work on copies of what was there; afterwards it has again what it has now."""
        now = {each: (dict(each._buffers), _attributes(each)) for each in self._buffers}
        for each, buffers in self._buffers.items():
            copies = {n: b if b is None else self._clones.get(b, b) for n, b in buffers.items()}
            _put(each, copies, self._attributes[each])
        try:
            yield
        finally:
            for each, (buffers, attributes) in now.items():
                _put(each, buffers, attributes)


def _put(module: nn.Module, buffers: dict[str, Tensor | None], attributes: dict[str, Any]) -> None:
    module._buffers.update(buffers)
    for name in _attributes(module).keys() - attributes.keys():
        del vars(module)[name]
    vars(module).update(attributes)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a module may change in its forward; torch's own have none."""
    if type(module).__module__.startswith("torch.nn."):
        return {}
    return {name: value for name, value in vars(module).items() if name not in INTERNAL}


def _copy_container(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict, set) else value
