"""What all ranks have of a step, put together from their files (`mpkit.strategies.runtime.evidence`)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpkit.common.launch_folder import part
from mpkit.strategies.models.python_state import Remembered
from mpkit.strategies.runtime.evidence import digest_of, evidence_of
from mpkit.strategies.stage.shard import Shard

__all__ = ["Elements", "WholeStep", "assemble_step", "files_of"]


@dataclass(frozen=True)
class Elements:
    """Where the elements that one rank updates lie in a parameter of the model.

    Attributes:
        start: the first one in the rank's part of the parameter, flattened.
        shard: that part; None if it is the whole parameter.
    """

    rank: int
    name: str
    start: int
    shard: Shard | None

    def take(self, whole: Tensor, count: int) -> Tensor:
        """Return these elements of a whole tensor."""
        local = whole if self.shard is None else self.shard.take(whole)
        return local.reshape(-1)[self.start : self.start + count]

    def put(self, values: Tensor, whole: Tensor) -> None:
        """Write these elements into a whole tensor."""
        local = whole if self.shard is None else self.shard.take(whole)
        flat = local.reshape(-1)
        flat[self.start : self.start + values.numel()] = values.reshape(-1)
        if self.shard is None:
            whole.copy_(flat.view(whole.shape))
        else:
            self.shard.put(flat.view(self.shard.shape), whole)


@dataclass
class WholeStep:
    """A step of all ranks.

    Attributes:
        before, after: the weights before and after the step, by name.
        gradients: the gradients before they are clipped; None for a parameter without one.
        states: the optimizer's states before the step, by name and key; None if the step before was verified too.
        held: (elements, gradient or None, after) of each rank, to compare each with the whole.
        digests: (rank, name, shard, dtype, digest, before) of each parameter that a rank computes with.
        buffers, buffers_before: by rank, by name.
        draws: what each rank drew at random, by stage and micro-batch.
        places: by rank, what the random numbers of each of its micro-batches were seeded with.
        remembered: what model and loss remember in Python from earlier steps, of the first rank that does.
        other_memory: the places of what they remember that cannot be sent.
        other_draws: whether a forward drew random numbers that are not torch's.
        frozen: elements of parameters that are not trained, where the step before was not verified.
        missing: names of parameters of which no rank updates some elements.
        losses: each rank's share of the loss; None where it computes none.
    """

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    states: dict[str, dict[str, Any]] | None
    held: list[tuple[Elements, Tensor | None, Tensor]] = field(default_factory=list)
    digests: list[tuple[int, str, Shard | None, str, str, bool]] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)
    buffers_before: list[dict[str, Tensor]] = field(default_factory=list)
    draws: list[dict[tuple[int, int], list[Tensor]]] = field(default_factory=list)
    places: list[set[tuple[int, int, int, int]]] = field(default_factory=list)
    frozen: list[tuple[Elements, Tensor]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    remembered: Remembered = field(default_factory=dict)
    other_memory: list[str] = field(default_factory=list)
    other_draws: bool = False
    decides: bool = False
    losses: list[float | None] = field(default_factory=list)
    scale: float = 1.0
    skipped: bool = False

    def other_replicas(self, *, after: bool) -> list[tuple[int, str]]:
        """Return (rank, name) of each parameter that a rank computes with and that is not the one that was updated."""
        weights = self.after if after else self.before
        expected: dict[Any, str] = {}
        wrong = []
        for rank, name, shard, dtype, digest, before in self.digests:
            if before == after or name not in weights:
                continue
            key = name, shard, dtype
            if key not in expected:
                whole = weights[name]
                local = whole if shard is None else shard.take(whole)
                expected[key] = digest_of(local.to(getattr(torch, dtype.removeprefix("torch."))))
            if expected[key] != digest:
                wrong.append((rank, name))
        return wrong


def files_of(folder: Path, ranks: int, step: int, kind: Callable[[int], str] = evidence_of) -> list[Path]:
    """Return each rank's file for a step, counted from 0."""
    return [part(folder, rank, kind(step)) for rank in range(ranks)]


def assemble_step(paths: list[Path], shapes: dict[str, torch.Size], trained: Collection[str]) -> WholeStep:
    """Return what the ranks have of a step, and remove their files."""
    # By our own ranks, in a folder that is only ours.
    files = [torch.load(path, map_location="cpu", mmap=True, weights_only=False) for path in paths]
    for path in paths:
        path.unlink()
    found = WholeStep({}, {}, dict.fromkeys(trained), None)
    filled = {name: torch.zeros(shapes[name], dtype=torch.bool) for name in trained}
    for rank, file in enumerate(files):
        for piece, after in zip(file["pieces"], file["after"], strict=True):
            name, values = piece["name"], piece["held"]
            shape = shapes[name]
            where = Elements(rank, name, piece["start"], piece["shard"])
            gradient = file["gradients"].get(name)
            found.held.append((where, gradient, after))
            if name in found.before and _all_filled(where, filled[name], values.numel()):
                continue
            where.put(torch.ones(values.numel(), dtype=torch.bool), filled[name])
            _put(found.before, where, values, shape)
            _put(found.after, where, after, shape)
            if gradient is not None:
                _put(found.gradients, where, gradient, shape)
            for key, state in (piece["states"] or {}).items():
                found.states = {} if found.states is None else found.states
                states = found.states.setdefault(name, {})
                if isinstance(state, Tensor) and state.numel() == values.numel() and key != "step":
                    _put(states, where, state, shape, key)
                else:
                    states[key] = state
        for before, digests in ((True, file["before"]), (False, file["digests"])):
            found.digests += [
                (rank, name, shard, dtype, digest, before)
                for name, (shard, dtype, digest) in digests.items()
                if name in shapes
            ]
        for piece in file["frozen"]:
            where = Elements(rank, piece["name"], piece["start"], piece["shard"])
            found.frozen.append((where, piece["held"]))
        found.draws.append(file["draws"])
        found.places.append(file["places"])
        found.losses.append(file["loss"])
        found.buffers.append(file["buffers"])
        found.buffers_before.append(file["buffers_before"])
        values, others = file["remembered"]
        found.remembered = values | found.remembered
        found.other_memory += [place for place in others if place not in found.other_memory]
    found.missing = [name for name, mask in filled.items() if not bool(mask.all())]
    found.other_draws = any(file["other_draws"] for file in files)
    found.decides = any(file["decides"] for file in files)
    found.scale, found.skipped = files[0]["scale"], files[0]["skipped"]
    return found


def _all_filled(where: Elements, mask: Tensor, count: int) -> bool:
    return bool(where.take(mask, count).all())


def _put(into: dict[str, Any], where: Elements, values: Tensor, shape: torch.Size, key: str = "") -> None:
    key = key or where.name
    if where.shard is None and values.numel() == shape.numel():
        into[key] = values.view(shape)
        return
    if into.get(key) is None:
        into[key] = torch.zeros(shape, dtype=values.dtype)
    where.put(values, into[key])
