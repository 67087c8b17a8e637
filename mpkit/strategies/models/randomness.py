"""Random numbers that are the same wherever they are drawn: dropout masks in serial training and in any pipeline.

Serial training draws in the order of its computations, and the ranks of a pipeline compute in another order. So each
layer draws from a seed of its own, made from the training's seed; the step, micro-batch and replica; and its name.

With the same micro-batches, every plan drops the same activations: the serial one, any schedule on any number of ranks,
a recomputed forward, and a training that resumes from a checkpoint. Replicas draw differently from each other, and so
do ranks with parts of the same activations (`mpkit.strategies.models.own_draws`). Python's and NumPy's generators are
seeded with torch's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import pack
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from mpkit.errors import MpkitError
from mpkit.strategies.models.own_draws import OwnDraws, generators_of

SILENT = ("linear", "conv", "normalization", "batchnorm", "sparse", "flatten", "container", "padding", "loss")
"""The modules of torch.nn whose layers draw no random numbers."""

SEEDED = (
    "A forward, or the loss, sets the seed of torch's random numbers (torch.manual_seed). Ranks draw for their own "
    "samples, so each would draw for its samples what plain PyTorch draws for the first ones. What works: no "
    "seed inside the forward, and seed=0 in train(); or numbers that are made once and kept: "
    'self.register_buffer("noise", ...)'
)


def is_users_seed(seed: int) -> bool:
    """Return whether a seed may be the user's: those of layers and of spans are hashes of 63 bits."""
    return seed < 2**32


@dataclass(frozen=True)
class Draws:
    """The random numbers of one micro-batch on its way through the layers."""

    place: tuple[int, int, int, int]  # the training's seed, the step, the replica and the micro-batch
    device: torch.device
    own: OwnDraws  # where the rank draws other numbers than ranks with the same samples
    others: OtherDraws | None = None  # learns of draws that are not torch's
    _latest: list[int] = field(default_factory=list)  # the seed that the latest layer began with

    def begin(self, layer: str, spans: Sequence[str] = ()) -> None:
        """Seed the generators for a layer that starts in these spans, and draws from here on."""
        self.check_seed()
        if self.others is not None:
            self.others.end()
        seed = seed_of(*self.place, layer=layer)
        for generator in generators_of(self.device):
            generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if self.others is not None:
            self.others.begin(self.place)
        self.own.enter(spans, self.device)
        self._latest[:] = [torch.initial_seed()]

    def check_seed(self) -> None:
        """Check that the present layer has set no seed by itself."""
        seed = torch.initial_seed()
        if self._latest and seed != self._latest[0] and is_users_seed(seed):
            raise MpkitError(SEEDED)

    @contextmanager
    def preserve_state(self) -> Iterator[None]:
        """Restore the random state after the block, in which layers draw."""
        states = [(generator, generator.get_state()) for generator in generators_of(self.device)]
        try:
            yield
            self.check_seed()
        finally:
            self._latest.clear()
            self.own.leave()
            if self.others is not None:
                self.others.end()
            for generator, state in states:
                generator.set_state(state)


@dataclass(frozen=True)
class RandomState:
    """The states of random generators: Python's, NumPy's, and torch's on the host and on a GPU, if given."""

    python: Any
    numpy: dict[str, Any]
    host: Tensor | None = None
    gpu: Tensor | None = None
    device: torch.device | None = None

    @classmethod
    def now(cls, device: torch.device | None = None) -> RandomState:
        """Return the current states; torch's only if a device is given."""
        numpy: Any = np.random.get_state(legacy=False)
        host = None if device is None else torch.get_rng_state()
        gpu = torch.cuda.get_rng_state(device) if device is not None and device.type == "cuda" else None
        return cls(random.getstate(), numpy, host, gpu, device)

    def restore(self) -> None:
        """Continue from these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        if self.host is not None:
            torch.set_rng_state(self.host)
        if self.gpu is not None and self.device is not None:
            torch.cuda.set_rng_state(self.gpu, self.device)

    def has_moved(self) -> bool:
        """Return whether Python's or NumPy's generators have drawn since."""
        now: Any = np.random.get_state(legacy=False)
        key, then = now.pop("state"), dict(self.numpy)
        key_then = then.pop("state")
        same = now == then and key["pos"] == key_then["pos"] and np.array_equal(key["key"], key_then["key"])
        return not same or self.python != random.getstate()

    def pack(self) -> Tensor:
        """Return the states as the bytes of a JSON text."""
        state = self.numpy["state"]
        states = {
            "torch": None if self.host is None else bytes(self.host.tolist()).hex(),
            "cuda": None if self.gpu is None else bytes(self.gpu.tolist()).hex(),
            "python": self.python,
            "numpy": self.numpy | {"state": {"key": state["key"].tolist(), "pos": state["pos"]}},
        }
        return _bytes_of(json.dumps(states).encode())

    @classmethod
    def unpack(cls, packed: Tensor, device: torch.device) -> RandomState:
        """Return the states that were packed, for this device."""
        states = json.loads(bytes(packed.tolist()))
        version, numbers, gauss = states["python"]
        states["numpy"]["state"]["key"] = np.array(states["numpy"]["state"]["key"], np.uint32)
        texts = states["torch"], states["cuda"] if device.type == "cuda" else None
        host, gpu = (None if text is None else _bytes_of(bytes.fromhex(text)) for text in texts)
        return cls((version, tuple(numbers), gauss), states["numpy"], host, gpu, device)


def _bytes_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@contextmanager
def preserve_random_state(device: torch.device) -> Iterator[None]:
    """Let all generators continue after the block as if nothing had been drawn inside."""
    state = RandomState.now(device)
    try:
        yield
    finally:
        state.restore()


class OtherDraws:
    """Whether layers draw from Python's or NumPy's generators, and what torch's are seeded with."""

    def __init__(self) -> None:
        self.drawn = False  # whether a layer has, so far
        self.places: set[tuple[int, int, int, int]] = set()  # of micro-batches whose layers have begun
        self._start: RandomState | None = None

    @property
    def is_looking(self) -> bool:
        """Whether a layer has begun."""
        return self._start is not None

    def begin(self, place: tuple[int, int, int, int]) -> None:
        """Look from here on, in a layer of the micro-batch at this place."""
        self.places.add(place)
        self._start = RandomState.now()

    def end(self) -> None:
        """Look no further."""
        self.drawn = self.drawn or (self._start is not None and self._start.has_moved())
        self._start = None


def seed_of(seed: int, step: int, replica: int, microbatch: int, layer: str) -> int:
    """Return a number of 63 bits that differs for every combination of these arguments."""
    place = pack("<QqqqL", seed % 2**64, step, replica, microbatch, crc32(layer.encode()))
    return int.from_bytes(blake2b(place, digest_size=8).digest(), "little") >> 1


def seed_all(seed: int, device: torch.device) -> None:
    """Seed the random numbers of torch, Python and NumPy.

    `torch.manual_seed` keeps the stack of its caller for GPUs that nobody has used yet, which takes 5 ms.
    """
    seed_torch = torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def may_draw(layer: nn.Module) -> bool:
    """Return whether a layer, or a module inside it, may draw random numbers.

    >>> may_draw(nn.Linear(2, 2)), may_draw(nn.Sequential(nn.Linear(2, 2), nn.Dropout())), may_draw(nn.ReLU())
    (False, True, False)
    """
    return not all(_is_silent(type(module)) for module in layer.modules())


def _is_silent(kind: type[nn.Module]) -> bool:
    parent, _, file = kind.__module__.rpartition(".")
    if parent != "torch.nn.modules":
        return False
    return file in SILENT or (file == "activation" and kind not in (nn.RReLU, nn.MultiheadAttention))
