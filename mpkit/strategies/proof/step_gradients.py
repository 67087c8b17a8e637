"""The gradients of a step in a loop, compared with those of the plain module, and why they differ.

    own        what the plain module's backwards make on each rank, one after another
    expected   what was there before the step, and the mean of `own` over all ranks. Ranks that share a batch, as under
               tensor parallelism, have equal ones, so the mean is right for any mesh
    after      this rank's gradients when autograd ended the last backward: torch's DDP and FSDP have averaged them
    now        when the optimizer begins: a loop of one's own may have averaged or clipped them

Either `after` or `now` has to be as expected. What happens between the two may scale all by one number, as clipping
does, and by the same one on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from mpkit.strategies.proof.held_tensors import HeldTensors, local, whole
from mpkit.strategies.proof.noise import Noise
from mpkit.strategies.proof.plain_module import Gradients, wide
from mpkit.strategies.proof.ranks import Ranks
from mpkit.strategies.proof.rounding import FEW, distance, largest
from mpkit.strategies.proof.shares import NEAR, Shares, explain_shares

__all__ = ["StepGradients", "Verdict", "compare_step", "largest_difference"]

MANY = 64
"""The number of parts up to which shares are looked for."""

Local = Mapping[str, Tensor | None]

LOCAL_NORM = (
    "So each rank has clipped by the norm of its own part, and not by that of all gradients. What works: "
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), which knows DTensors; model.clip_grad_norm_(1.0) of a "
    "wrapper of mpkit's"
)
ELSE = (
    "Outputs and buffers are equal, so the backward or the reduction over the ranks makes something else of it: a "
    "checkpoint or an autograd.Function that looks at other ranks or at the whole batch. Without it the step is that "
    "of plain PyTorch; or leave the proof out, if the difference is meant"
)


@dataclass
class StepGradients:
    """What this rank has of a step.

    Attributes:
        own: the plain module's gradients of each backward.
        before, after: this rank's gradients before the first backward, and after the last one.
        past: what autograd accumulates in this rank's parameters, before ranks exchange it.
        apart: whether the module computes with other tensors than these parameters, as under FSDP.
    """

    own: list[Gradients] = field(default_factory=list)
    before: dict[str, Tensor | None] = field(default_factory=dict)
    after: dict[str, Tensor | None] = field(default_factory=dict)
    past: dict[str, Tensor] = field(default_factory=dict)
    apart: bool = False

    def total(self, name: str, like: Tensor) -> Tensor:
        """Return this rank's own gradient, whole and in 64 bits."""
        made = [each[name] for each in self.own if name in each]
        return sum(made[1:], made[0]) if made else wide(torch.zeros_like(like))


class Verdict(NamedTuple):
    """What the comparison of a step says.

    Attributes:
        findings: what is not as in plain PyTorch on this rank, at most one.
        worst: the largest difference, relative to the largest element.
        note: what is said besides.
        why_not: why the step cannot be compared.
    """

    findings: Sequence[str] = ()
    worst: float = 0.0
    note: str = ""
    why_not: str = ""


class Difference(NamedTuple):
    """A gradient that is not as expected: how far off, in words, and what was got, expected and there before."""

    name: str
    by: float
    few: float
    says: str


def compare_step(
    step: StepGradients,
    plain: Mapping[str, torch.nn.Parameter],
    held: HeldTensors,
    ranks: Ranks,
    noise: Noise,
    eps: float,
) -> Verdict:
    """Compare the gradients of a step; every rank calls it.

    Args:
        step: the step.
        plain: the plain module's parameters.
        held: what this rank's optimizer updates.
        ranks: all ranks.
        noise: how far rounding brings this rank's own gradients apart.
        eps: the coarsest rounding in the step.
    """
    names = [name for name, parameter in plain.items() if parameter.requires_grad]
    now = {name: parameter.grad for name, parameter in held.named.items()}
    changed = ranks.any(any(not _same(now.get(n), step.after.get(n)) for n in names))
    both = (step.after, now) if changed else (step.after,)
    tables = [_compare(step, each, plain, held, ranks, names, eps) for each in both]
    worst = min(table.worst for table in tables)
    if all(ranks.any(bool(table.found)) for table in tables):
        # ---- beyond the noise
        spreads = torch.tensor([noise.spread(n) for n in names], dtype=torch.float64)
        device = next(iter(plain.values())).device
        allowed = dict(zip(names, ranks.most(spreads.to(device)).tolist(), strict=True))
        for table in tables:
            table.found = [d for d in table.found if d.by > d.few + allowed[d.name]]
    right = [not ranks.any(bool(table.found)) for table in tables]
    if not changed:
        return Verdict(worst=worst) if right[0] else _explain(step, tables[0], plain, held, ranks, names)
    clip = ranks.all((_factor(now, step.after, names), tables[1].factor))
    since, of_expected = ([each[i] for each in clip] for i in range(2))
    if right[0] and _one_each(since) and not _one(since):
        return Verdict([_clipped(since, ranks)])
    if any(right):
        return Verdict(worst=worst)
    # ---- neither: averaged and then clipped by hand
    usual = {i**p / (ranks.size * j) ** q for i in (1, ranks.size, len(step.own)) for j in (1, len(step.own))
             for p in (0, 1, 2) for q in (0, 1, 2)}  # fmt: skip
    factor = of_expected[0]
    if _one_each(of_expected) and not _one_each(since):
        if not _one(of_expected):
            return Verdict([_clipped(of_expected, ranks)])
        if 0 < factor < 1 and all(abs(factor / each - 1) > 1e-5 for each in usual):
            return Verdict(
                worst=NEAR,
                note=f"all gradients are scaled by {factor:.3g} before the step, as clipping does",
            )
    table = tables[0] if _one_each(since) else tables[1]
    return _explain(step, table, plain, held, ranks, names)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    one, other = local(one), local(other)
    return one.shape == other.shape and torch.equal(one, other)


def _one_each(factors: list[float]) -> bool:
    return all(factor > 0 for factor in factors)


def _one(factors: list[float]) -> bool:
    return max(factors) - min(factors) <= 1e-4 * max(factors)


def _clipped(factors: list[float], ranks: Ranks) -> str:
    return (
        f"all gradients were scaled by {factors[ranks.index]:.4g} before the step, and by "
        f"{', '.join(f'{factor:.4g}' for factor in factors)} on the ranks. {LOCAL_NORM}"
    )


def _factor(now: Local, after: Local, names: list[str]) -> float:
    """Return how many times as large gradients have become since the backward; 0 if they are no multiple."""
    shares = Shares(1)
    for name in names:
        one, other = now.get(name), after.get(name)
        if one is None or other is None:
            if one is not other:
                return 0.0
            continue
        shares.add(wide(local(one)).reshape(-1), wide(local(other)).reshape(1, -1))
    return next(iter(shares.solve()), 0.0)


@dataclass
class _Table:
    """The gradients at one moment beside the expected ones."""

    of: Local
    found: list[Difference] = field(default_factory=list)
    worst: float = 0.0
    factor: float = 0.0


def _local(held: HeldTensors, name: str, tensor: Tensor) -> Tensor:
    """Return what is compared of a gradient that this rank has: flat, whole if it is a DTensor, in 64 bits."""
    return wide(whole(tensor)).reshape(-1)


def _compare(
    step: StepGradients, got: Local, plain: Mapping[str, torch.nn.Parameter], held: HeldTensors, ranks: Ranks,
    names: list[str], eps: float,
) -> _Table:  # fmt: skip
    table, shares = _Table(got), Shares(1)
    device = next(iter(plain.values())).device
    there = ranks.all({name: got.get(name) is not None for name in names})
    mine = torch.tensor([largest(step.total(n, plain[n])) for n in names], dtype=torch.float64, device=device)
    sizes = ranks.most(mine).tolist()
    for name, size in zip(names, sizes, strict=True):
        have = [of_rank[name] for of_rank in there]
        before = step.before.get(name)
        expected = ranks.mean(step.total(name, plain[name]))
        wanted = held.part(name, expected)
        tensor = got.get(name)
        if tensor is None or wanted is None or (hasattr(tensor, "full_tensor") and not all(have)):
            # Of a parameter that is divided, another rank may have none of it.
            if wanted is not None and tensor is None and size > 0 and name in held.named:
                says = f"{name} has no gradient, and has one in plain PyTorch."
                table.found.append(Difference(name, inf, 0.0, says))
            continue
        values = _local(held, name, tensor)
        wanted = wanted if before is None else wanted + _local(held, name, before)
        size = max(size, largest(wanted))
        by, few = distance(values, wanted), FEW * eps * size
        table.worst = max(table.worst, by / size if size else 0.0)
        shares.add(values, wanted[None])
        if by > few:
            says = f"the gradient of {name}: {largest_difference(values, wanted)}."
            table.found.append(Difference(name, by, few, says))
    table.factor = next(iter(shares.solve()), 0.0)
    return table


def _explain(
    step: StepGradients, table: _Table, plain: Mapping[str, torch.nn.Parameter], held: HeldTensors, ranks: Ranks,
    names: list[str],
) -> Verdict:  # fmt: skip
    """Look for the ranks and backwards of which the gradients are made; every rank calls it."""
    if _past_outputs(step, plain, held, ranks, names):
        return Verdict(why_not=PAST)
    several = len(step.own) if len(step.own) * ranks.size <= MANY else 1
    first = table.found[0].name if table.found else ""
    every, alone = Shares(ranks.size * several), Shares(ranks.size * several)
    there = ranks.all({name: table.of.get(name) is not None for name in names})
    for name in names:
        zeros = wide(torch.zeros_like(plain[name]))
        own = [each.get(name, zeros) for each in step.own] if several > 1 else [step.total(name, zeros)]
        parts = [ranks.each(one) for one in own]  # of each backward, [ranks, ...]
        got = table.of.get(name)
        if got is None or (hasattr(got, "full_tensor") and not all(each[name] for each in there)):
            continue
        mine = [held.part(name, one) for part in zip(*parts, strict=True) for one in part]
        if mine and mine[0] is not None:
            before = step.before.get(name)
            values = _local(held, name, got)
            values = values if before is None else values - _local(held, name, before)
            stacked = torch.stack([one for one in mine if one is not None])
            every.add(values, stacked)
            if name == first:
                alone.add(values, stacked)
    if not table.found:
        return Verdict()
    difference = table.found[0]
    for what, shares in (("All gradients are", every), (f"The gradient of {first} is", alone)):
        solved = shares.solve()
        told = explain_shares(solved, ranks.ranks, ranks.rank) if solved else ""
        if told:
            return Verdict([f"{difference.says} {what} {told}."])
    if difference.by == inf:
        return Verdict([
            f"{difference.says} A rank that does not use a parameter has to take part in its mean all the same, with "
            "zeros: find_unused_parameters=True in torch's DDP"
        ])  # fmt: skip
    return Verdict([f"{difference.says} {ELSE}"])


PAST = (
    "the loss uses the parameters by themselves, besides the module's outputs (a penalty); weight_decay of the "
    "optimizer does the same, and is compared"
)


def _past_outputs(
    step: StepGradients,
    plain: Mapping[str, torch.nn.Parameter],
    held: HeldTensors,
    ranks: Ranks,
    names: list[str],
) -> bool:
    """Return whether the parameters' gradients have a term besides the outputs', the same on all ranks."""
    if ranks.size == 1 or held.divided:
        return False
    found, other = False, False
    there = ranks.all({name: name in step.past for name in names})
    for name in names:
        if not all(of_rank[name] for of_rank in there):
            continue
        rest = _local(held, name, step.past[name])
        rest = rest if step.apart else rest - step.total(name, plain[name]).reshape(-1)
        every = ranks.each(rest)
        if largest(every) > NEAR * max(map(largest, ranks.each(step.total(name, plain[name])))):
            found = True
            other = other or distance(every[0].expand_as(every), every) > NEAR * largest(every)
    return found and not other


def largest_difference(one: Tensor, other: Tensor) -> str:
    """Return in words by which element two tensors differ most.

    >>> largest_difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))
    'an element is 2 and not 2.5'
    """
    a, b = one.detach().reshape(-1), other.detach().reshape(-1)
    a, b = (each.to(torch.complex128 if each.is_complex() else torch.float64) for each in (a, b))
    at = int(torch.nan_to_num((a - b).abs(), nan=inf).argmax())
    return f"an element is {a[at].item():.6g} and not {b[at].item():.6g}"
