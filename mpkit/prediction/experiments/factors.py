"""Factors by which plays are off, and the training that is played with any plan to find them.

    measured    seconds of an action on a rank, from a run or a profile
    counted     seconds of the same action played on tensors without content (`mk.trace_fake`), on an assumed core
    factor      measured / counted; it is applied to the actions of another played plan

So the plan's own code says which operators there are and how they change with the size of a micro-batch, and what was
measured says how fast they are here. `mk.profile` has factors of the whole model by kind of action, `Run.what_if` has
one for each action of a step. Both assume `START` and `SPLIT`, which are fitted on CPU ranks and used for those only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.common.arrays import Array
from mpkit.launch.session.cluster import Cluster
from mpkit.plan.plan import Plan
from mpkit.prediction.dry_run import trace_fake
from mpkit.strategies.data.microbatch import map_tensors
from mpkit.trace import TIMED_BY_EVENTS, Kind, Trace

if TYPE_CHECKING:
    import torch


WHOLE = Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER
HALVES = Kind.INPUT_GRAD, Kind.WEIGHT_GRAD
ACTIONS = *WHOLE, *HALVES, Kind.RECOMPUTE, Kind.COMPUTE
LIKE = {Kind.RECOMPUTE: Kind.FORWARD, Kind.COMPUTE: Kind.FORWARD}  # take the factor of another kind
BACKWARDS = Kind.BACKWARD, *HALVES

SPLIT = 1.3
"""How many times as long both halves of a split backward take on a core as the whole one, whose gradients live shorter:
fitted to GPT blocks of width 192 with 1 to 16 sequences of 64 tokens (1.1 to 1.4), on the kit's test machine."""

START = 30e-6
"""Seconds of a core that an operator takes beside its roofline: fitted to forwards and backwards of the same blocks."""


def kinds_of(trace: Trace) -> set[Kind]:
    """Return the kinds of actions in a trace."""
    return set(ACTIONS) & {Kind(kind) for rank in trace.ranks for kind in set(rank.ops["kind"].tolist())}


def change_ops(trace: Trace, change: Callable[[int, Array], None]) -> Trace:
    """Return the trace after `change(rank, ops)` of a copy of each rank's ops."""
    copies = [replace(rank, ops=rank.ops.copy()) for rank in trace.ranks]
    for number, rank in enumerate(copies):
        change(number, rank.ops)
    return replace(trace, ranks=copies)


def scale_trace(trace: Trace, factor: Callable[[int, Kind, Array], Any], kinds: Collection[Kind]) -> Trace:
    """Scale the times of a trace's ops of these kinds by `factor(rank, kind, ops)`: a number, or one per op."""

    def scale(rank: int, ops: Array) -> None:
        for kind in kinds:
            mine = ops["kind"] == int(kind)
            if mine.any():
                ops["cpu"][mine] = ops["cpu"][mine] * factor(rank, kind, ops[mine])

    return change_ops(trace, scale)


def with_starts(trace: Trace, seconds: float) -> Trace:
    """Add the seconds in which operators start, which do not shrink with the micro-batch, to a played trace."""

    def add(_: int, ops: Array) -> None:
        played = (ops["kind"] < Kind.WAIT) & (ops["value"] > 0)
        ops["cpu"][played] += (ops["value"][played] * seconds * 1e9).astype(ops["cpu"].dtype)

    return change_ops(trace, add)


@dataclass(frozen=True)
class Factors:
    """The factors of one step of a run, for the actions of other plans."""

    rows: dict[tuple[Kind, int], list[Array]]
    stages: list[list[str]]
    hardware: str = ""
    split: float = 1.0

    @classmethod
    def from_traces(cls, measured: Trace, step: int, counted: Trace) -> Factors:
        """Pair the times of a step of a run with those counted for its played plan, whose last step is taken."""
        rows: dict[tuple[Kind, int], list[Array]] = {}
        events, last = measured.meta.get("device") in TIMED_BY_EVENTS, last_step(counted)
        for took, counts in zip(measured.ranks, counted.ranks, strict=True):
            played = dict(_actions(counts.ops, last))
            for key, ops in _actions(took.ops, step):
                if key not in played:
                    continue  # of the user's own, which no played plan has
                seconds = ops["end"] - ops["start"] if events else ops["cpu"]
                pair = seconds, np.maximum(played[key]["cpu"], 1)
                if len(ops) != len(played[key]):  # the model decides for itself what it runs
                    pair = tuple(np.array([each.sum()]) for each in pair)  # type: ignore[assignment]
                rows.setdefault(key, []).append(np.stack(pair).astype(float))
        hardware = str(measured.meta.get("hardware", ""))
        return cls(rows, measured.meta["stages"], hardware, 1.0 if events else SPLIT)

    def apply_to(self, counted: Trace) -> Trace:
        """Return a played plan whose actions take as long as those of the run would.

        An action takes the factor of the run's action of its kind, of the stage with its layers, at the same fraction
        of the step's actions and of the ranks that have them.
        """
        holders: dict[tuple[Kind, int], list[int]] = {}
        last = last_step(counted)
        for number, rank in enumerate(counted.ranks):
            for key, _ in _actions(rank.ops, last):
                holders.setdefault(key, []).append(number)

        def factor(rank: int, kind: Kind, ops: Array) -> Array:
            factors = np.ones(len(ops))
            for stage, step in set(zip(ops["stage"].tolist(), ops["step"].tolist(), strict=True)):
                mine = (ops["stage"] == stage) & (ops["step"] == step)
                ranks = holders.get((kind, stage), [])
                place = (ranks.index(rank), len(ranks)) if rank in ranks else (0, 1)
                shares = self._shares(counted.meta["stages"][stage] if stage >= 0 else None)
                count = int(mine.sum())
                pairs = [share * self._pair(kind, own, place, count) for own, share in shares.items()]
                measured, expected = sum(pairs[1:], pairs[0])
                factors[mine] = measured / expected
            return factors

        # Its times are measured ones now, of the run's machine.
        meta = {name: value for name, value in counted.meta.items() if name not in ("fake", "hardware")}
        meta |= {"hardware": self.hardware} if self.hardware else {}
        return replace(scale_trace(counted, factor, kinds_of(counted)), meta=meta)

    def _shares(self, names: list[str] | None) -> dict[int, float]:
        """Return by stage of the run the share of its layers that are among these; {-1: 1} without a stage."""
        if names is None:
            return {-1: 1.0}
        common = {number: len(set(own) & set(names)) for number, own in enumerate(self.stages)}
        shares = {number: layers / len(self.stages[number]) for number, layers in common.items() if layers}
        return shares or dict.fromkeys(common, 1.0)

    def _pair(self, kind: Kind, stage: int, place: tuple[int, int], count: int) -> Array:
        """Return (2, count): measured and counted times of a stage's actions on a place, (which, of how many) ranks."""
        rows = self.rows.get((kind, stage)) or self.rows.get((LIKE.get(kind, kind), stage))
        if rows is None and kind in BACKWARDS:  # whole in the run and split here, or the other way round
            of_kinds = [self.rows[each, stage] for each in BACKWARDS if (each, stage) in self.rows]
            means = [[row.mean(axis=1, keepdims=True) for row in ranks] for ranks in of_kinds]
            longer = self.split if kind in HALVES else 1 / self.split  # of what was measured
            both = np.array([[longer], [1.0]])
            rows = [both * sum(parts[1:], parts[0]) for parts in zip(*means, strict=True)]
        if not rows:
            return np.ones((2, count))
        which, ranks = place
        first, stop = which * len(rows) // ranks, -(-(which + 1) * len(rows) // ranks)
        these = [row[:, np.arange(count) * row.shape[1] // count] for row in rows[first:stop]]
        pair: Array = sum(these[1:], these[0])
        return pair


def last_step(trace: Trace) -> int:
    """Return the number of a trace's last step."""
    return max(int(rank.ops["step"].max()) for rank in trace.ranks)


def _actions(ops: Array, step: int) -> Iterator[tuple[tuple[Kind, int], Array]]:
    """Yield the actions of a step by kind and stage, each in program order."""
    actions = ops[(ops["step"] == step) & (ops["kind"] < Kind.WAIT) & (ops["depth"] == 0)]
    for kind, stage in sorted(set(zip(actions["kind"].tolist(), actions["stage"].tolist(), strict=True))):
        yield (Kind(kind), stage), actions[(actions["kind"] == kind) & (actions["stage"] == stage)]


def play_training(
    model: torch.nn.Module, batch: tuple[Any, Any], plan: Plan, *, loss: Callable[[Any, Any], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer], max_grad_norm: float | None = None,
    samples: int | None = None, steps: int = 1, cluster: Cluster | None = None,
) -> Trace:  # fmt: skip
    """Play a plan on the assumed core of "cpu", with contentless copies of a model and of a batch's first samples."""
    import torch

    tensors = (*model.parameters(), *model.buffers())
    empty = deepcopy(model, {id(tensor): _on_meta(tensor) for tensor in tensors})
    batch = batch if samples is None else first_samples(samples, batch)
    shapes = tuple(map_tensors(lambda t: torch.empty_like(t, device="meta"), part) for part in batch)
    return trace_fake(
        lambda: empty, plan, batch=shapes, loss=loss, optimizer=optimizer, steps=steps, hardware="cpu",
        max_grad_norm=max_grad_norm, cluster=cluster,
    )  # fmt: skip


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    empty = torch.empty_like(tensor.detach(), device="meta")
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty


def first_samples(samples: int, batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the first samples of a batch."""
    return tuple(map_tensors(lambda t: t[:samples], value) for value in batch)
