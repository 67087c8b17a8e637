"""Where a recomputed call starts: random states, autocast and buffers, as the first run found them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mpkit.errors import MpkitError
from mpkit.strategies.models.own_draws import OwnDraws
from mpkit.strategies.models.randomness import RandomState, preserve_random_state

__all__ = ["Buffers", "Setting", "WrittenState"]

Buffers = dict[tuple[nn.Module, str], Tensor]
"""A module's buffers, by the module within it that has them, and by name."""


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
    """The buffers of a module whose forwards run twice: the second begins with what the first found.

    A forward clones those into which an earlier one wrote; the first forward clones all.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._written: set[tuple[nn.Module, str]] | None = None  # None: not known yet

    def _now(self) -> Buffers:
        return {
            (each, name): buffer
            for each in self.module.modules()
            for name, buffer in each._buffers.items()
            if buffer is not None
        }

    @contextmanager
    def first(self) -> Iterator[Buffers]:
        """Return what the forward inside the block starts from."""
        found = self._now()
        versions = {key: buffer._version for key, buffer in found.items()}
        start = {
            key: buffer.clone() if self._written is None or key in self._written else buffer
            for key, buffer in found.items()
        }
        yield start
        written = {key for key, buffer in found.items() if buffer._version != versions[key]}
        if self._written is None:
            self._written = written
            start |= {key: found[key] for key in found.keys() - written}
        elif late := written - self._written:
            name = next(
                name for name, each in self.module.named_modules() if each in {key[0] for key in late}
            )
            raise MpkitError(
                f"{name or type(self.module).__name__} wrote into a buffer into which it had not written before, and "
                "recompute= needs the value that was there. Write into it in the first forward too, or keep all "
                "activations, Plan(recompute='none')"
            )

    @contextmanager
    def begin_again(self, start: Buffers) -> Iterator[None]:
        """Let the module work on what was there; afterwards it has again what it has now."""
        now = self._now()
        _put(start)
        try:
            yield
        finally:
            _put(now)


def _put(buffers: Buffers) -> None:
    for (module, name), buffer in buffers.items():
        module._buffers[name] = buffer
