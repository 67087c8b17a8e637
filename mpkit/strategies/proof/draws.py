"""The random numbers that the ranks drew in a step, for the serial step to use.

Ranks draw for their own samples, features and tokens, and serial training draws for all of them at once. So what each
rank drew is put together: along the features or tokens that tp or cp divides, then along the batch. This also checks
that ranks which compute the same drew the same, and that those which compute different things did not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from mpkit.common.torch_private import _current_graph_task_id
from mpkit.plan.plan import Plan
from mpkit.strategies.context.sequence import sequence_part
from mpkit.strategies.data.microbatch import shares, split
from mpkit.strategies.models.heard_draws import CannotReplay

CHANCE = 1e-9  # the chance of a coincidence below which equal draws are none

SHARED = "replicas, or micro-batches, draw the same random numbers for different samples"


class SharedDraws(Exception):
    """Ranks drew the same numbers for different things, different ones for the same, or not as often as serially."""

    def __str__(self) -> str:
        return f"{super().__str__()}."


@dataclass
class StepDraws:
    """All draws of a step."""

    plan: Plan
    size: int  # samples in the batch
    by_rank: list[dict[tuple[int, int], list[Tensor]]]  # by (stage, micro-batch), the draws in order
    decides: bool = False  # the model looks at values while it draws, until it accepts a number, say
    before: dict[int, float] = field(default_factory=dict)  # `chances` of the step before
    _lines: dict[tuple[int, int, int, int], list[Tensor]] = field(init=False)
    # Those of replicas without samples of their own.
    _idle: dict[tuple[int, int, int, int], list[Tensor]] = field(init=False)
    _next: int = field(default=0, init=False)
    _chances: dict[int, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        lines: dict[tuple[int, int, int, int], list[tuple[int, list[Tensor]]]] = {}
        for rank, heard in enumerate(self.by_rank):
            place = self.plan.mesh.place(rank)
            for (stage, m), drawn in heard.items():
                lines.setdefault((place.dp, m, place.cp, place.tp), []).append((stage, drawn))
        self._lines, self._idle = {}, {}
        cut = self._cut()
        for where, stages in lines.items():
            dp, m, *_ = where
            begin, end = cut[m]
            of = self._lines if begin + dp < end else self._idle
            of[where] = [tensor for _, drawn in sorted(stages, key=lambda each: each[0]) for tensor in drawn]

    def __bool__(self) -> bool:
        return any(self._lines.values())

    def check_places(self, places: list[set[tuple[int, int, int, int]]]) -> None:
        """Check that no two replicas or micro-batches draw from one seed, since a few draws would not show it.

        `places` has, by rank, what the numbers of its micro-batches were seeded with.
        """
        computed: dict[int, set[int]] = {}
        seeded: dict[int, set[tuple[int, int, int, int]]] = {}
        for rank, (heard, of) in enumerate(zip(self.by_rank, places, strict=True)):
            dp = self.plan.mesh.place(rank).dp
            computed.setdefault(dp, set()).update(m for _, m in heard)
            seeded.setdefault(dp, set()).update(of)
        if self and len(set().union(*seeded.values())) < sum(map(len, computed.values())):
            raise SharedDraws(SHARED)

    def begin(self) -> None:
        """Begin again with the first draw."""
        self._next = 0
        self._chances.clear()

    @property
    def chances(self) -> dict[int, float]:
        """By pair of blocks of samples that drew the same so far, in this step and those before it: the chance."""
        before = self.before
        return {pair: each * before.get(pair, 1.0) for pair, each in self._chances.items() if each <= 1.0}

    def give(self, shape: tuple[int, ...], probability: float | None) -> Tensor:
        """Return the next draw, for the whole batch.

        Raises:
            SharedDraws: ranks share draws that are their own, or do not share those that are common.
            CannotReplay: it cannot be put together.
        """
        number, self._next = self._next, self._next + 1
        blocks: dict[tuple[int, int], dict[tuple[int, int], Tensor]] = {}
        for (dp, m, cp, tp), drawn in self._lines.items():
            if number >= len(drawn):
                if _current_graph_task_id() >= 0:
                    raise CannotReplay("a forward that a backward repeats draws random numbers")
                if self.decides and drawn:
                    raise CannotReplay(
                        "the model looks at values while it draws random numbers, and so draws another number of times "
                        "for other samples"
                    )
                raise SharedDraws(
                    f"the ranks draw {len(drawn)} times in a forward, and serial training draws once more: they "
                    "compute in another mode, training or evaluation, or take another way through the model"
                )
            blocks.setdefault((dp, m), {})[cp, tp] = drawn[number]
        if not blocks:
            raise CannotReplay("random numbers are drawn where the ranks' draws are not heard")
        return self._batch(blocks, shape)

    def parts(self) -> list[tuple[slice, float, StepDraws]]:
        """Return the samples of each replica's share of each micro-batch, with its weight and its own draws.

        A replica without samples computes another's sample, of weight 0.
        """
        rows = shares(self.size, len(self._cut()), self.plan.dp)
        found = []
        for m, (begin, end) in enumerate(self._cut()):
            for dp, which in enumerate(rows[m]):
                k = len(range(self.size)[which])
                made = StepDraws(self.plan, k, [], self.decides)
                lines = self._lines if begin + dp < end else self._idle
                made._lines = {where: drawn for where, drawn in lines.items() if where[:2] == (dp, m)}
                found.append((which, k / self.size if begin + dp < end else 0.0, made))
        return found

    def _cut(self) -> list[tuple[int, int]]:
        """Return where each micro-batch begins and ends."""
        return split(self.size, min(self.plan.microbatches, self.size))

    def _batch(
        self, blocks: dict[tuple[int, int], dict[tuple[int, int], Tensor]], shape: tuple[int, ...]
    ) -> Tensor:
        """Put the blocks of micro-batches and replicas together."""
        rows = shares(self.size, len(self._cut()), self.plan.dp)
        whole: Tensor | None = None
        joined: list[Tensor] = []
        for (dp, m), parts in blocks.items():
            k = self.size if len(blocks) == 1 else len(range(self.size)[rows[m][dp]])
            dim = self._batch_dim(shape, k)
            block = self._join(parts, shape, dim, k)
            if len(blocks) == 1:
                return block
            joined.append(block)
            if whole is None:
                whole = block.new_empty(shape)
            each = shape[dim] // self.size
            into = whole.unflatten(dim, (self.size, each)).movedim(dim, 0)[rows[m][dp]]
            into.copy_(block.unflatten(dim, (k, each)).movedim(dim, 0))
        alone = [_chance(a, b) for a, b in pairwise(joined)]
        for pair, chance in enumerate(alone):
            self._chances[pair] = self._chances.get(pair, 1.0) * (chance if chance <= 1.0 else inf)
        # Small draws tell something together. As long as a pair draws the same its chances multiply, and so do those
        # of pairs: twice each, since any of them might be the equal ones.
        together = prod(2 * chance for chance in self.chances.values() if chance < 0.5)
        if min(*alone, together) < CHANCE:
            raise SharedDraws(SHARED)
        assert whole is not None
        return whole

    def _batch_dim(self, shape: tuple[int, ...], k: int) -> int:
        if k == self.size:
            return 0
        for dim, length in enumerate(shape):
            if length and length % self.size == 0:
                return dim
        raise CannotReplay("a layer draws one number for all samples of a micro-batch")

    def _join(self, parts: dict[tuple[int, int], Tensor], shape: tuple[int, ...], dim: int, k: int) -> Tensor:
        """Put the parts of the ranks along cp and tp together."""
        wanted = list(shape)
        if wanted:
            wanted[dim] = shape[dim] // self.size * k if k != self.size else shape[dim]
        rows = [[parts[cp, tp] for tp in range(self.plan.tp)] for cp in range(self.plan.cp)]
        for along_tp in (None, *range(len(shape))):
            for along_cp in (None, *range(len(shape))):
                length = list(rows[0][0].shape)
                if len(length) != len(wanted):
                    continue
                if along_tp is not None:
                    length[along_tp] = sum(part.shape[along_tp] for part in rows[0])
                if along_cp is not None:
                    length[along_cp] *= self.plan.cp
                if length == wanted:
                    lines = [_concatenate(row, along_tp, "tp") for row in rows]
                    return self._in_order(lines, along_cp)
        raise CannotReplay(f"ranks draw {list(rows[0][0].shape)} where serial training draws {list(shape)}")

    def _in_order(self, lines: list[Tensor], dim: int | None) -> Tensor:
        """Put parts of sequences together, in the order of the tokens."""
        whole = _concatenate(lines, dim, "cp")
        if dim is None or len(lines) == 1:
            return whole
        tokens = torch.arange(whole.shape[dim]).unsqueeze(0)
        order: Any = [sequence_part(tokens, i, len(lines), self.plan.cp_order) for i in range(len(lines))]
        return whole.index_select(dim, torch.cat(order, 1).squeeze(0).argsort())


def _concatenate(parts: list[Tensor], dim: int | None, axis: str) -> Tensor:
    """Concatenate parts that have to differ; if they have to be equal, return one."""
    if dim is None:
        if not all(torch.equal(parts[0], part) for part in parts[1:]):
            raise SharedDraws(f"ranks along {axis} draw different random numbers for the same activations")
        return parts[0]
    for a, b in pairwise(parts):
        if _chance(a, b) < CHANCE:
            raise SharedDraws(f"ranks along {axis} draw the same random numbers for different activations")
    return torch.cat(parts, dim)


def _chance(a: Tensor, b: Tensor) -> float:
    """Return the chance of equal draws, by the share of their most frequent value; 2 if they are not equal.

    The smaller of two blocks is compared with the beginning of the other one.

    >>> _chance(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0, 1.0])), _chance(torch.ones(2), torch.ones(2))
    (0.25, 1.0)
    """
    count = min(a.numel(), b.numel())
    a, b = a.reshape(-1)[:count], b.reshape(-1)[:count]
    if not torch.equal(a, b):
        return 2.0
    if not count:
        return 1.0
    share = float(a.unique(return_counts=True)[1].max()) / count
    return float((share**2 + (1 - share) ** 2) ** count)
