"""Random numbers that are the same wherever they are drawn: dropout masks in serial training and in any pipeline.

Serial training draws in the order in which it computes, and the ranks of a pipeline compute in a different order. So
each layer draws from a seed of its own, which depends on

    seed          the seed of the training
    step, micro-batch, replica     which samples are computed
    layer         its name

With the same micro-batches, every plan drops the same activations: the serial one, any schedule on any number of ranks,
a recomputed forward, and a training that resumes from a checkpoint. Replicas draw differently from each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from struct import pack
from zlib import crc32

import torch
from torch import nn

__all__ = ["Draws", "Randomness", "may_draw"]

SILENT = ("linear", "conv", "normalization", "batchnorm", "sparse", "flatten", "container", "padding", "loss")
"""The modules of torch.nn whose layers draw no random numbers."""


@dataclass(frozen=True)
class Draws:
    """The random numbers of one micro-batch on its way through the layers."""

    generators: tuple[torch.Generator, ...]
    place: tuple[int, int, int, int]

    def begin(self, layer: str) -> None:
        """Seed the generators for a layer, whose random numbers are drawn from here on."""
        seed = seed_of(*self.place, layer=layer)
        for generator in self.generators:
            generator.manual_seed(seed)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Restore the random state afterwards, so that layers draw inside without changing it."""
        states = [generator.get_state() for generator in self.generators]
        try:
            yield
        finally:
            for generator, state in zip(self.generators, states, strict=True):
                generator.set_state(state)


@dataclass(frozen=True)
class Randomness:
    """The source of a rank's `Draws`.

    Attributes:
        seed: the seed of the training.
        replica: the replica that the rank belongs to.
        device: the device of the rank.
    """

    seed: int
    replica: int
    device: torch.device

    def draws(self, step: int, microbatch: int) -> Draws:
        """Return the random numbers for a micro-batch."""
        generators: tuple[torch.Generator, ...] = (torch.default_generator,)
        if self.device.type == "cuda":
            generators += (torch.cuda.default_generators[self.device.index or 0],)
        return Draws(generators, (self.seed, step, self.replica, microbatch))


def seed_of(seed: int, step: int, replica: int, microbatch: int, layer: str) -> int:
    """Return a number of 63 bits that differs for every combination of these arguments.

    >>> seed_of(0, 1, 0, 2, "block0") == seed_of(0, 1, 0, 2, "block0") != seed_of(0, 1, 0, 2, "block1")
    True
    """
    place = pack("<QqqqL", seed % 2**64, step, replica, microbatch, crc32(layer.encode()))
    return int.from_bytes(blake2b(place, digest_size=8).digest(), "little") >> 1


def may_draw(layer: nn.Module) -> bool:
    """Return whether a layer may draw random numbers; it does not if none of the modules inside it does.

    >>> may_draw(nn.Linear(2, 2)), may_draw(nn.Sequential(nn.Linear(2, 2), nn.Dropout())), may_draw(nn.ReLU())
    (False, True, False)
    """
    return not all(_is_silent(type(module)) for module in layer.modules())


def _is_silent(kind: type[nn.Module]) -> bool:
    parent, _, file = kind.__module__.rpartition(".")
    if parent != "torch.nn.modules":
        return False
    return file in SILENT or (file == "activation" and kind not in (nn.RReLU, nn.MultiheadAttention))
