"""How wrong results are related to the right ones, in a sentence that is true whatever led to them.

    factor         a constant times the right one, such as n, 1/n or the number of micro-batches
    place          what another rank should have, transposed, in another order, one step late
    only           wrong on some ranks, in some parts, from some step on, or only in cases with other sizes

A relation is told if it holds for all that is wrong, within the tolerance of results. An exercise lists the mistakes
that are common in it; this finds a word for those that nobody has foreseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mpkit.course.framework.equal import difference, is_tensor
from mpkit.course.framework.exercise import Case, Seen

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Relation:
    """A relation that holds: its name, such as "a-constant-factor", and what holds, in a sentence."""

    name: str
    words: str


def find_relation(seen: Seen, passed: Sequence[Case] = ()) -> Relation | None:
    """Return the most telling relation that holds; None if none does, or there are no results.

    >>> find_relation(Seen(Case(2), expected=[[1.5, 2.5]] * 2, got=[[3.0, 5.0]] * 2)).words
    'What you got is 2 times what it should be, wherever it is wrong, and there are 2 ranks.'

    Args:
        seen: what the answer did in the case that failed.
        passed: the cases in which it was right.
    """
    if seen.got is None or len(seen.got) != len(seen.expected):
        return None
    pairs = enumerate(zip(seen.expected, seen.got, strict=True))
    parts = [part for rank, (expected, got) in pairs for part in _parts_of(rank, "", expected, got)]
    wrong = [part for part in parts if difference(part.expected, part.got) is not None]
    if not wrong:
        return None
    return (
        _find_nothing(wrong)
        or _find_factor(seen.case, wrong)
        or _find_other_rank(seen, wrong)
        or _find_place(wrong)
        or _find_first_step(wrong)
        or _find_ranks(len(seen.got), wrong)
        or _find_sections(parts, wrong)
        or _find_sizes(seen.case, passed)
    )


def _find_nothing(wrong: Sequence[_Part]) -> Relation | None:
    name = _name_of(wrong)
    if all(part.got is None for part in wrong):
        where = f" of rank {wrong[0].rank}" if len({part.rank for part in wrong}) == 1 else ""
        return Relation("nothing-there", f"{name}{where} is None: nothing was returned or assigned there.")
    if _hold(wrong, lambda _, got: got.numel() > 0 and not got.any()):
        return Relation("all-zero", f"{name} is zero in every place.")
    if _hold(wrong, lambda _, got: got.numel() > 0 and got.isnan().all()):
        return Relation("all-nan", f"{name} is nan in every place.")
    return None


# ---- factor


def _find_factor(case: Case, wrong: Sequence[_Part]) -> Relation | None:
    factors: set[float] = set()

    def is_multiple(expected: Tensor, got: Tensor) -> bool:
        if expected.shape != got.shape or not (expected.isfinite().all() and got.isfinite().all()):
            return False
        if not expected.any():
            return False
        factor = float((expected * got).sum() / (expected * expected).sum())
        factors.add(round(factor, 6) if abs(factor) > 1e-3 else factor)
        return factor != 0.0 and difference(expected * factor, got) is None

    if not _hold(wrong, is_multiple) or len(factors) != 1:
        return None
    factor = factors.pop()
    if factor == -1.0:
        return Relation("the-sign", f"{_name_of(wrong)} has the wrong sign, and is right otherwise.")
    why = _name_factor(factor, case, wrong)
    numbers = {number for part in wrong for number in part.numbers[0].flatten().tolist()}  # type: ignore[index]
    if not why and len(numbers) < 2:  # of one number, everything is a factor
        return None
    inverse = 1 / factor
    is_share = 0 < factor < 1 and abs(inverse - round(inverse)) < 1e-4
    times = f"1/{inverse:.5g}" if is_share else f"{factor:.5g}"
    more = f", and {why}" if why else ""
    return Relation(
        "a-constant-factor",
        f"{_name_of(wrong)} is {times} times what it should be, wherever it is wrong{more}.",
    )


def _name_factor(factor: float, case: Case, wrong: Sequence[_Part]) -> str:
    """Return which number of the case a factor, or its inverse, is; "" if none."""
    times = factor if abs(factor) >= 1 else 1 / factor
    whole = round(times)
    if abs(times - whole) > 1e-4 * abs(times) or whole < 2:
        return ""
    if whole == case.ranks:
        return f"there are {case.ranks} ranks"
    for name, size in case.sizes.items():
        if type(size) is int and whole == size:
            return str(Case(0, sizes={name: size})).partition(", ")[2] + " is the case"
    if whole == case.ranks**2:
        return f"there are {case.ranks} ranks: it is applied twice"
    if is_tensor(wrong[0].expected) and whole in wrong[0].expected.shape:
        return f"a side of it has {whole} numbers"
    return ""


# ---- place


def _find_other_rank(seen: Seen, wrong: Sequence[_Part]) -> Relation | None:
    assert seen.got is not None
    mine = sorted({part.rank for part in wrong})
    theirs = []
    for rank in mine:
        ranks = range(len(seen.expected))
        others = [other for other in ranks if difference(seen.expected[other], seen.got[rank]) is None]
        if not others:
            return None
        theirs.append(others[0])
    more = f", and so on for {len(mine)} ranks" if len(mine) > 1 else ""
    return Relation("another-ranks", f"Rank {mine[0]} has what rank {theirs[0]} should have{more}.")


def _find_place(wrong: Sequence[_Part]) -> Relation | None:
    """Find the right numbers in other places: rows for columns, a step late or early, in another order."""
    name = _name_of(wrong)
    if _hold(wrong, lambda a, b: a.dim() == 2 and difference(a.t(), b) is None):
        return Relation("transposed", f"{name} is right but for this: rows and columns are exchanged.")
    if all(isinstance(part.expected, list) for part in wrong):  # such as losses
        if _hold(wrong, lambda a, b: a.shape == b.shape and len(b) > 2 and difference(a[:-1], b[1:]) is None):
            return Relation("a-step-off", f"{name} has the right values one step late.")
        if _hold(wrong, lambda a, b: a.shape == b.shape and len(b) > 2 and difference(b[:-1], a[1:]) is None):
            return Relation("a-step-off", f"{name} has the right values one step early.")

    def has_the_numbers(a: Tensor, b: Tensor) -> bool:
        same = a.numel() == b.numel() >= 2
        return same and difference(a.flatten().sort().values, b.flatten().sort().values) is None

    if _hold(wrong, has_the_numbers):
        how = "order" if _hold(wrong, lambda a, b: a.shape == b.shape) else "shape"
        return Relation("another-order", f"{name} has the right numbers, in another {how}.")
    return None


# ---- only


def _find_first_step(wrong: Sequence[_Part]) -> Relation | None:
    for part in wrong:
        if not isinstance(part.expected, list) or not _hold([part], lambda a, b: a.shape == b.shape):
            continue
        right = [difference(a, b) is None for a, b in zip(*part.numbers, strict=True)]  # type: ignore[misc]
        first = right.index(False)
        if first and len(right) > 1:
            before = f"{part.at}[0] is" if first == 1 else f"{part.at}[0] to [{first - 1}] are"
            said = f"{before} right, and [{first}] is the first that is not: what happens between them?"
            return Relation("right-at-first", said)
    return None


def _find_ranks(count: int, wrong: Sequence[_Part]) -> Relation | None:
    bad = sorted({part.rank for part in wrong})
    good = [rank for rank in range(count) if rank not in bad]
    if not good:
        return None
    theirs, others = (
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for ranks in (good, bad)
    )
    are = "is" if len(good) == 1 else "are"
    return Relation("some-ranks", f"{theirs.capitalize()} {are} right, {others} not.")


def _find_sections(parts: Sequence[_Part], wrong: Sequence[_Part]) -> Relation | None:
    bad = list(dict.fromkeys(part.at for part in wrong))
    good = [name for name in dict.fromkeys(part.at for part in parts) if name not in bad]
    if not good:
        return None
    some, these = (", ".join(names[:3]) + (" and more" if len(names) > 3 else "") for names in (good, bad))
    return Relation("some-parts", f"Right on every rank: {some}. Wrong: {these}.")


def _find_sizes(case: Case, passed: Sequence[Case]) -> Relation | None:
    if not passed:
        return None
    before = passed[-1]
    other = ["ranks"] if case.ranks != before.ranks else []
    other += [name for name in case.sizes if case.sizes[name] != before.sizes.get(name)]
    what = f": what changes with {' and '.join(other)}?" if other else "."
    return Relation("other-sizes", f"It is right on {before}, and wrong on {case}{what}")


# ---- the parts of results: tensors, numbers and lists in dicts and lists, right and wrong ones side by side


@dataclass(frozen=True)
class _Part:
    """A part of a rank's results, such as one tensor of a dict."""

    rank: int
    at: str
    expected: Any
    got: Any

    @cached_property
    def numbers(self) -> tuple[Tensor, Tensor] | None:
        """The expected numbers and the answer's, float64; None if one of them is no tensor, number or list."""
        import torch

        if isinstance(self.expected, bool) or isinstance(self.got, bool):
            return None
        try:
            expected, got = (
                torch.as_tensor(each).detach().to(torch.float64) for each in (self.expected, self.got)
            )
        except (TypeError, ValueError, RuntimeError):
            return None
        return expected, got


def _hold(parts: Sequence[_Part], relation: Callable[[Tensor, Tensor], Any]) -> bool:
    """Return whether a relation of expected and got numbers holds for all parts."""
    return all(part.numbers is not None and bool(relation(*part.numbers)) for part in parts)


def _parts_of(rank: int, at: str, expected: Any, got: Any) -> Iterator[_Part]:
    """Yield the parts of a result: the values of dicts and lists that have the same form, or the whole."""
    if isinstance(expected, dict) and isinstance(got, dict) and expected.keys() == got.keys():
        for key, each in expected.items():
            yield from _parts_of(rank, f"{at}[{key!r}]" if at else str(key), each, got[key])
    elif isinstance(expected, list | tuple) and isinstance(got, list | tuple) and len(expected) == len(got):
        if expected and all(isinstance(each, dict | list | tuple) or is_tensor(each) for each in expected):
            for i, each in enumerate(expected):
                yield from _parts_of(rank, f"{at}[{i}]", each, got[i])
        else:
            yield _Part(rank, at, expected, got)
    else:
        yield _Part(rank, at, expected, got)


def _name_of(parts: Sequence[_Part]) -> str:
    """Return what is wrong, in words: the name of the part if there is one part only."""
    names = {part.at for part in parts}
    return names.pop() or "What you got" if len(names) == 1 else "What is wrong"
