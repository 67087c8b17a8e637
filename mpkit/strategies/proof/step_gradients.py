"""The gradients of a step in a loop, compared with those of the plain module, and why they differ.

    own        what the plain module's backwards make on each rank, one after another
    expected   what was there before the step, and the mean of `own` over all ranks. Ranks that share a batch, as under
               tensor parallelism, have equal ones, so the mean is right for any mesh
    after      this rank's gradients when autograd ended the last backward: torch's DDP and FSDP have averaged them
    now        when the optimizer begins: a loop of one's own may have averaged or clipped them

Either `after` or `now` has to be as expected. Between the two all may be scaled by one number, as clipping does, which
is the same on all ranks.

A gradient that is neither is nearly always some other sum of the ranks' own: this rank's alone, the sum, the mean over
a few ranks, one micro-batch counted twice. With the gradients g_1 ... g_n of ranks and backwards as parts, the numbers
c that minimize |got - c_1 g_1 - ... - c_n g_n|^2 say which (`Shares`). They need only the products of the parts with
each other, n^2 numbers, which add up over parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpkit.strategies.proof.compare import Noise, difference_in_words, say
from mpkit.strategies.proof.plain_module import Gradients, Received, wide
from mpkit.strategies.proof.ranks import HeldTensors, Ranks, local, whole
from mpkit.strategies.proof.rounding import FEW, distance, largest

NEAR = 1e-3  # the relative residual up to which shares explain a gradient, and the error of an exact share
MANY = 64  # the number of parts up to which shares are looked for

Local = Mapping[str, Tensor | None]


@dataclass
class StepGradients:
    """What this rank has of a step."""

    heard: list[Received] = field(default_factory=list)  # by backward, what reached the outputs of forwards
    own: list[Gradients] = field(default_factory=list)  # the plain module's gradients of each backward
    before: Local = field(default_factory=dict)  # this rank's gradients before the first backward
    after: Local = field(default_factory=dict)  # and after the last one
    past: dict[str, Tensor] = field(default_factory=dict)  # accumulated here, before ranks exchange it
    apart: bool = False  # whether the module computes with other tensors than these parameters, as under FSDP

    def total(self, name: str, like: Tensor) -> Tensor:
        """Return this rank's own gradient, whole and in 64 bits."""
        made = [each[name] for each in self.own if name in each]
        return sum(made[1:], made[0]) if made else wide(torch.zeros_like(like))


class Verdict(NamedTuple):
    """What the comparison of a step says."""

    finding: str = ""  # what is not as in plain PyTorch on this rank
    worst: float = 0.0  # the largest difference, relative to the largest element
    note: str = ""
    why_not: str = ""


class _Gap(NamedTuple):
    """A gradient that is not as expected: how far off, how far it may be, and in words."""

    name: str
    by: float
    few: float
    says: str


@dataclass
class _Table:
    """The gradients at one moment beside the expected ones, and how many times as large all of them are."""

    of: Local
    gaps: list[_Gap] = field(default_factory=list)
    worst: float = 0.0
    factor: float = 0.0


class StepComparison:
    """The comparison of one step's gradients; each method is called by every rank."""

    def __init__(
        self, step: StepGradients, plain: Mapping[str, nn.Parameter], held: HeldTensors, ranks: Ranks
    ) -> None:
        self.step, self.held, self.ranks = step, held, ranks
        self.plain = {name: parameter for name, parameter in plain.items() if parameter.requires_grad}
        self.device = next(iter(plain.values())).device

    def verdict(self, noise: Noise, eps: float) -> Verdict:
        """Compare, given how far rounding brings gradients apart here (noise), and the coarsest rounding (eps)."""
        step, ranks, names = self.step, self.ranks, list(self.plain)
        now = {name: parameter.grad for name, parameter in self.held.named.items()}
        changed = ranks.any(any(not _same(now.get(name), step.after.get(name)) for name in names))
        tables = [self._table(each, eps) for each in ((step.after, now) if changed else (step.after,))]
        worst = min(table.worst for table in tables)
        if all(ranks.any(bool(table.gaps)) for table in tables):
            # ---- beyond the noise
            allowed = dict(zip(names, self._most([noise.spread(name) for name in names]), strict=True))
            for table in tables:
                table.gaps = [gap for gap in table.gaps if gap.by > gap.few + allowed[gap.name]]
        right = [not ranks.any(bool(table.gaps)) for table in tables]
        if not changed:
            return Verdict(worst=worst) if right[0] else self._explain(tables[0])
        factors = ranks.all((_factor(now, step.after, names), tables[1].factor))
        since, of_expected = ([each[i] for each in factors] for i in range(2))
        if right[0] and min(since) > 0 and not _one(since):
            return Verdict(_clipped(since, ranks))
        if any(right):
            return Verdict(worst=worst)
        # ---- neither: averaged and then clipped by hand
        if min(of_expected) > 0 and not min(since) > 0:
            if not _one(of_expected):
                return Verdict(_clipped(of_expected, ranks))
            if self._is_clip(factor := of_expected[0]):
                scaled = f"all gradients are scaled by {factor:.3g} before the step, as clipping does"
                return Verdict(worst=NEAR, note=scaled)
        return self._explain(tables[0] if min(since) > 0 else tables[1])

    def _is_clip(self, factor: float) -> bool:
        """Return whether a common factor is no usual mistake: a number of ranks or backwards, divided by or not."""
        n, k = self.ranks.size, len(self.step.own)
        usual = {i**p / (n * j) ** q for i in (1, n, k) for j in (1, k) for p in range(3) for q in range(3)}
        return 0 < factor < 1 and all(abs(factor / each - 1) > 1e-5 for each in usual)

    def _most(self, values: Sequence[float]) -> list[float]:
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        most: list[float] = self.ranks.most(mine).tolist()
        return most

    def _have(self, got: Local) -> Iterator[tuple[str, bool, Tensor | None]]:
        """Yield each parameter's name, whether all ranks have a gradient of it, and this rank's, if comparable.

        If another rank has none of a divided parameter's gradient, nobody can put it together.
        """
        there = self.ranks.all({name: got.get(name) is not None for name in self.plain})
        for name in self.plain:
            tensor, everywhere = got.get(name), all(of_rank[name] for of_rank in there)
            yield name, everywhere, tensor if everywhere or not hasattr(tensor, "full_tensor") else None

    def _table(self, got: Local, eps: float) -> _Table:
        table, shares, before = _Table(got), Shares(1), self.step.before
        own = [largest(self.step.total(name, parameter)) for name, parameter in self.plain.items()]
        sizes = dict(zip(self.plain, self._most(own), strict=True))
        for name, _, tensor in self._have(got):
            size, mean = sizes[name], self.ranks.mean(self.step.total(name, self.plain[name]))
            wanted = self.held.part(name, mean)
            if wanted is None or tensor is None:
                if wanted is not None and got.get(name) is None and size > 0 and name in self.held.named:
                    says = f"{name} has no gradient, and has one in plain PyTorch."
                    table.gaps.append(_Gap(name, inf, 0.0, says))
                continue
            values, earlier = _flat(tensor), before.get(name)
            wanted = wanted if earlier is None else wanted + _flat(earlier)
            size = max(size, largest(wanted))
            by, few = distance(values, wanted), FEW * eps * size
            table.worst = max(table.worst, by / size if size else 0.0)
            shares.add(values, wanted[None])
            if by > few:
                says = f"the gradient of {name} is {difference_in_words(values, wanted)}."
                table.gaps.append(_Gap(name, by, few, says))
        table.factor = next(iter(shares.solve()), 0.0)
        return table

    def _explain(self, table: _Table) -> Verdict:
        """Look for the ranks and backwards of which the gradients are made."""
        if self._past_outputs():
            return Verdict(why_not=say("past"))
        own, ranks = self.step.own, self.ranks
        several = len(own) if len(own) * ranks.size <= MANY else 1
        first = table.gaps[0].name if table.gaps else ""
        every, alone = Shares(ranks.size * several), Shares(ranks.size * several)
        for name, _, tensor in self._have(table.of):
            zeros = wide(torch.zeros_like(self.plain[name]))
            mine = [each.get(name, zeros) for each in own] if several > 1 else [self.step.total(name, zeros)]
            of_ranks = zip(*(ranks.each(one) for one in mine), strict=True)  # of each rank, its backwards
            parts = [self.held.part(name, one) for of_rank in of_ranks for one in of_rank]
            if tensor is None or not parts or parts[0] is None:
                continue
            earlier = self.step.before.get(name)
            values = _flat(tensor) if earlier is None else _flat(tensor) - _flat(earlier)
            stacked = torch.stack([part for part in parts if part is not None])
            every.add(values, stacked)
            if name == first:
                alone.add(values, stacked)
        if not table.gaps:
            return Verdict()
        gap = table.gaps[0]
        for what, shares in (("All gradients are", every), (f"The gradient of {first} is", alone)):
            solved = shares.solve()
            if solved and (words := explain_shares(solved, ranks.ranks, ranks.rank)):
                return Verdict(f"{gap.says} {what} {words}.")
        return Verdict(f"{gap.says} {say('unused' if gap.by == inf else 'other_backward')}")

    def _past_outputs(self) -> bool:
        """Return whether the parameters' gradients have a term besides the outputs', the same on all ranks."""
        step, ranks = self.step, self.ranks
        if ranks.size == 1 or self.held.divided:
            return False
        found, other = False, False
        for name, everywhere, _ in self._have(step.past):
            if not everywhere:
                continue
            own = self.step.total(name, self.plain[name]).reshape(-1)
            rest = _flat(step.past[name]) if step.apart else _flat(step.past[name]) - own
            every = ranks.each(rest)
            if largest(every) > NEAR * largest(ranks.each(own)):
                found = True
                other = other or distance(every[0].expand_as(every), every) > NEAR * largest(every)
        return found and not other


def _flat(tensor: Tensor) -> Tensor:
    """Return what is compared of a gradient that this rank has: flat, whole if it is a DTensor, in 64 bits."""
    return wide(whole(tensor)).reshape(-1)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    one, other = local(one), local(other)
    return one.shape == other.shape and torch.equal(one, other)


def _one(factors: Sequence[float]) -> bool:
    return max(factors) - min(factors) <= 1e-4 * max(factors)


def _clipped(factors: Sequence[float], ranks: Ranks) -> str:
    every = ", ".join(f"{factor:.4g}" for factor in factors)
    return say("clipped", factor=factors[ranks.index], factors=every)


def _factor(now: Local, after: Local, names: Sequence[str]) -> float:
    """Return how many times as large gradients have become since the backward; 0 if they are not a multiple."""
    shares = Shares(1)
    for name in names:
        one, other = now.get(name), after.get(name)
        if one is None or other is None:
            if one is not other:
                return 0.0
            continue
        shares.add(wide(local(one)).reshape(-1), wide(local(other)).reshape(1, -1))
    return next(iter(shares.solve()), 0.0)


# ---- of whose gradients is a gradient made?


class Shares:
    """How many times each part counts in some gradients.

    >>> shares, parts = Shares(2), torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]])
    >>> shares.add(parts[0] * 2 + parts[1], parts)
    >>> [round(share, 6) for share in shares.solve()]
    [2.0, 1.0]
    """

    def __init__(self, parts: int) -> None:
        self._gram = torch.zeros(parts, parts, dtype=torch.float64)
        self._right = torch.zeros(parts, dtype=torch.float64)
        self._square = 0.0

    def add(self, got: Tensor, parts: Tensor) -> None:
        """Add some elements: of the gradient, [elements], and of the parts, [parts, elements]."""
        plain = (torch.view_as_real(t).flatten(-2) if t.is_complex() else t for t in (got.cpu(), parts.cpu()))
        got, parts = (t.double() for t in plain)
        self._gram += parts @ parts.T
        self._right += parts @ got
        self._square += float(got @ got)

    def solve(self, near: float = NEAR) -> list[float]:
        """Return the shares; nothing if no sum of the parts is what was got, up to this relative residual."""
        if not bool(torch.isfinite(self._gram).all()) or not self._square < float("inf"):
            return []
        scale = self._gram.diagonal().sqrt().clamp(min=1e-300)
        normed = self._gram / scale / scale[:, None]
        found = (torch.linalg.pinv(normed, rtol=1e-9, hermitian=True) @ (self._right / scale)) / scale
        residual = self._square - 2 * float(found @ self._right) + float(found @ self._gram @ found)
        return found.tolist() if residual <= near**2 * self._square else []


def explain_shares(shares: Sequence[float], ranks: Sequence[int], rank: int) -> str:
    """Return in words what is wrong with shares, which should all be one over the number of ranks; "" if nothing is.

    `shares` has, for each rank, one for each backward of the step.

    >>> explain_shares([0.0, 1.0], (0, 1), 1)
    "this rank's own: the mean over the ranks is missing"
    >>> explain_shares([1.0, 1.0], (0, 1), 1)
    '2 times as large: a sum in place of a mean, or the reverse'
    >>> explain_shares([0.5, 0.5, 0.0, 0.0], (0, 1, 2, 3), 1)
    'the mean over ranks [0, 1] alone, without [2, 3]'
    >>> explain_shares([1.0, 0.5, 1.0, 0.5], (0, 1), 1)
    'of backwards that count 2, 1 times in place of once: the accumulation over micro-batches is another one'
    """
    size, backwards = len(ranks), len(shares) // len(ranks)
    table = torch.tensor(list(shares)).view(size, backwards)
    of_rank = table.mean(1)
    alone = torch.zeros(size)
    alone[list(ranks).index(rank)] = 1.0
    if size > 1 and _near(table, alone[:, None].expand_as(table)):
        return "this rank's own: the mean over the ranks is missing"
    if _near(table, table.mean().expand_as(table)):
        factor = float(table.mean()) * size
        exact = abs(factor - 1) <= NEAR
        return "" if exact else f"{factor:.6g} times as large: a sum in place of a mean, or the reverse"
    if _near(table, table.mean(0).expand_as(table)):
        times = ", ".join(f"{float(each) * size:.4g}" for each in table.mean(0))
        other = "the accumulation over micro-batches is another one"
        return f"of backwards that count {times} times in place of once: {other}"
    there = [r for r, share in zip(ranks, of_rank.tolist(), strict=True) if abs(share) > NEAR]
    if len(there) < size:
        rest = [r for r in ranks if r not in there]
        return f"the mean over ranks {there} alone, without {rest}"
    weights = ", ".join(f"{float(each):.4g}" for each in of_rank)
    return f"a sum over the ranks in which they count {weights} times, and not 1/{size} each"


def _near(table: Tensor, other: Tensor) -> bool:
    return float((table - other).abs().max()) <= NEAR * max(1.0, float(other.abs().max()))
