"""What all ranks have of a step, put together from their files (`mpkit.strategies.runtime.evidence`)."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpkit.common.launch_folder import part
from mpkit.strategies.models.python_state import Remembered
from mpkit.strategies.runtime.evidence import digest_of, evidence_of
from mpkit.strategies.stage.shard import HeldPart, put_together


class RankPart(NamedTuple):
    """The elements of a parameter that one rank updates."""

    rank: int
    name: str
    before: HeldPart  # with their values before the step
    after: Tensor
    gradient: Tensor | None  # before it is clipped; None if there is none


@dataclass
class WholeStep:
    """A step of all ranks."""

    files: list[dict[str, Any]]  # what each rank has written
    held: list[RankPart]  # the elements of each rank, to compare each with the whole
    before: dict[str, Tensor] = field(default_factory=dict)  # the weights, by name
    after: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)  # before they are clipped
    # The optimizer's states before the step, by name and key; None if the step before was verified too.
    states: dict[str, dict[str, Any]] | None = None
    missing: list[str] = field(default_factory=list)  # parameters of which no rank updates some elements
    # What model and loss remember in Python from earlier steps: the first rank's, and places that cannot be sent.
    remembered: Remembered = field(default_factory=dict)
    other_memory: list[str] = field(default_factory=list)

    def of_ranks(self, key: str) -> list[Any]:
        """Return what each rank has written under a key."""
        return [file[key] for file in self.files]

    @property
    def skipped(self) -> bool:
        """Whether the ranks left the update out, since gradients overflowed in fp16."""
        return bool(self.files[0]["skipped"])

    def other_replicas(self, *, after: bool) -> list[tuple[int, str]]:
        """Return (rank, name) of each parameter that a rank computes with and that is not the updated one."""
        weights = self.after if after else self.before
        expected: dict[Any, str] = {}
        wrong = []
        for rank, digests in enumerate(self.of_ranks("digests" if after else "before")):
            for name, (shard, dtype, digest) in digests.items():
                key = name, shard, dtype
                if key not in expected and name in weights:
                    local = weights[name] if shard is None else shard.take(weights[name])
                    expected[key] = digest_of(local.to(getattr(torch, dtype.removeprefix("torch."))))
                if expected.get(key, digest) != digest:
                    wrong.append((rank, name))
        return wrong


def files_of(folder: Path, ranks: int, step: int, kind: Callable[[int], str] = evidence_of) -> list[Path]:
    """Return each rank's file for a step, counted from 0."""
    return [part(folder, rank, kind(step)) for rank in range(ranks)]


def assemble_step(paths: list[Path], trained: Collection[str]) -> WholeStep:
    """Return what the ranks have of a step, and remove their files."""
    # By our own ranks, in a folder that is only ours.
    files = [torch.load(path, map_location="cpu", mmap=True, weights_only=False) for path in paths]
    for path in paths:
        path.unlink()
    held = [
        RankPart(rank, name, piece, after.reshape(-1), file["gradients"].get(name))
        for rank, file in enumerate(files)
        for (name, piece, _), after in zip(file["pieces"], file["after"], strict=True)
    ]
    found = WholeStep(files, held)
    for name in trained:
        mine = [each for each in held if each.name == name]
        if not _covers([each.before for each in mine]):
            found.missing.append(name)
            continue
        found.before[name] = _whole([each.before for each in mine])
        found.after[name] = _whole([each.before._replace(tensor=each.after) for each in mine])
        there = [(each.before, each.gradient) for each in mine if each.gradient is not None]
        gradients = [before._replace(tensor=gradient.reshape(-1)) for before, gradient in there]
        found.gradients[name] = _whole(gradients) if gradients else None
    states: dict[str, dict[str, list[Any]]] = {}
    for file in files:
        for name, piece, of_piece in file["pieces"]:
            for key, state in (of_piece or {}).items():
                # A number, such as NAdam's mu_product, has no dimension, however few elements the rank updates.
                shaped = isinstance(state, Tensor) and (state.dim() > 0 or not piece.whole)
                divided = shaped and state.numel() == piece.tensor.numel() and key != "step"
                value = piece._replace(tensor=state.reshape(-1)) if divided else state
                states.setdefault(name, {}).setdefault(key, []).append(value)
        values, others = file["remembered"]
        found.remembered = values | found.remembered
        found.other_memory += [place for place in others if place not in found.other_memory]
    whole_states: dict[str, dict[str, Any]] = {}
    for name, keys in states.items():
        parts = {key: [each for each in of if isinstance(each, HeldPart)] for key, of in keys.items()}
        whole_states[name] = {key: _whole(parts[key]) if parts[key] else of[0] for key, of in keys.items()}
    found.states = whole_states or None
    return found


def _covers(parts: list[HeldPart]) -> bool:
    sizes = [(part, part.tensor.numel()) for part in _distinct(parts)]
    ones = [part._replace(tensor=torch.ones(size, dtype=torch.bool)) for part, size in sizes]
    return bool(ones) and bool(put_together(ones).all())


def _whole(parts: list[HeldPart]) -> Tensor:
    """Return the whole of these parts; the first rank's values where several have the same elements."""
    first = parts[0]
    if first.shard is None and first.tensor.numel() == torch.Size(first.whole).numel():
        return first.tensor.view(first.whole)
    return put_together(_distinct(parts))


def _distinct(parts: list[HeldPart]) -> list[HeldPart]:
    """Return the parts without those that an earlier rank has too, the first rank's last."""
    return list({(part.place, part.tensor.numel()): part for part in reversed(parts)}.values())
