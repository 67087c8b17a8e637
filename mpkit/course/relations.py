"""How wrong results are related to the right ones, in a sentence that is true whatever led to them.

    factor         a constant times the right one, such as n, 1/n or the number of micro-batches
    place          what another rank should have, transposed, in another order, one step late
    only           wrong on some ranks, in some parts, from some step on, or only in cases with other sizes

A relation is told if it holds for all that is wrong, within the tolerance of results. An exercise lists the mistakes
that are common in it; this finds a word for those that nobody has foreseen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpkit.course.framework.equal import difference, is_tensor
from mpkit.course.framework.exercise import Case, Seen

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Relation", "find_relation"]


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
    pairs = list(zip(seen.expected, seen.got, strict=True))
    parts = [part for rank, (a, b) in enumerate(pairs) for part in _parts_of(rank, "", a, b)]
    wrong = [part for part in parts if difference(part.expected, part.got) is not None]
    if not wrong:
        return None
    for find in (
        _find_nothing,
        _find_factor,
        _find_other_rank,
        _find_transpose,
        _find_shift,
        _find_order,
        _find_first_step,
        _find_ranks,
        _find_sections,
    ):
        if relation := find(seen, parts, wrong):
            return relation
    return _find_sizes(seen.case, passed)


# ---- factor


def _find_nothing(seen: Seen, parts: Sequence[_Part], wrong: Sequence[_Part]) -> Relation | None:
    if all(part.got is None for part in wrong):
        where = f" of rank {wrong[0].rank}" if len({part.rank for part in wrong}) == 1 else ""
        return Relation(
            "nothing-there", f"{_name_of(wrong)}{where} is None: nothing was returned or assigned there."
        )
    pairs = [pair for part in wrong if (pair := _numbers_of(part)) is not None and pair[1].numel()]
    if len(pairs) < len(wrong):
        return None
    if not any(bool(got.any()) for _, got in pairs):
        return Relation("all-zero", f"{_name_of(wrong)} is zero in every place.")
    if all(bool(got.isnan().all()) for _, got in pairs):
        return Relation("all-nan", f"{_name_of(wrong)} is nan in every place.")
    return None


def _find_factor(seen: Seen, parts: Sequence[_Part], wrong: Sequence[_Part]) -> Relation | None:
    pairs = [_numbers_of(part) for part in wrong]
    factors, numbers = set(), set()
    for pair in pairs:
        if pair is None or pair[0].shape != pair[1].shape:
            return None
        if not all(bool(side.isfinite().all()) for side in pair):
            return None
        expected, got = pair
        if not bool(expected.any()):
            return None
        factor = float((expected * got).sum() / (expected * expected).sum())
        if difference(expected * factor, got) is not None or not factor:
            return None
        factors.add(round(factor, 6) if abs(factor) > 1e-3 else factor)
        numbers |= set(expected.flatten().tolist())
    if len(factors) != 1:
        return None
    factor = factors.pop()
    why = _name_factor(factor, seen.case, wrong)
    if not why and len(numbers) < 2:  # of one number, everything is a factor
        return None
    if factor == -1.0:
        return Relation("the-sign", f"{_name_of(wrong)} has the wrong sign, and is right otherwise.")
    spelt = (
        f"1/{1 / factor:.5g}"
        if 0 < factor < 1 and abs(1 / factor - round(1 / factor)) < 1e-4
        else f"{factor:.5g}"
    )
    return Relation(
        "a-constant-factor",
        f"{_name_of(wrong)} is {spelt} times what it should be, wherever it is wrong{f', and {why}' if why else ''}.",
    )


def _name_factor(factor: float, case: Case, wrong: Sequence[_Part]) -> str:
    """Return which number of the case a factor, or its inverse, is; "" if none."""
    times = factor if abs(factor) >= 1 else 1 / factor
    whole = round(times)
    if abs(times - whole) > 1e-4 * abs(times) or whole < 2:
        return ""
    sizes = {f"there are {case.ranks} ranks": case.ranks}
    for name, size in case.sizes.items():
        if isinstance(size, int) and not isinstance(size, bool):
            sizes[str(Case(0, sizes={name: size})).partition(", ")[2] + " is the case"] = size
    named = [words for words, size in sizes.items() if size == whole]
    if not named and case.ranks > 1 and whole == case.ranks**2:
        named = [f"there are {case.ranks} ranks: it is applied twice"]
    for part in wrong[:1]:
        if not named and is_tensor(part.expected) and whole in part.expected.shape:
            named = [f"a side of it has {whole} numbers"]
    return named[0] if named else ""


# ---- place


def _find_other_rank(seen: Seen, parts: Sequence[_Part], wrong: Sequence[_Part]) -> Relation | None:
    expected, got = seen.expected, seen.got
    assert got is not None
    mine = sorted({part.rank for part in wrong})
    theirs = []
    for rank in mine:
        others = [other for other in range(len(expected)) if difference(expected[other], got[rank]) is None]
        if not others:
            return None
        theirs.append(others[0])
    first, other = mine[0], theirs[0]
    more = f", and so on for {len(mine)} ranks" if len(mine) > 1 else ""
    return Relation("another-ranks", f"Rank {first} has what rank {other} should have{more}.")


def _find_transpose(seen: Seen, parts: Sequence[_Part], wrong: Sequence[_Part]) -> Relation | None:
    for part in wrong:
        pair = _numbers_of(part)
        if pair is None or pair[0].dim() != 2 or difference(pair[0].t(), pair[1]) is not None:
            return None
    return Relation("transposed", f"{_name_of(wrong)} is right but for this: rows and columns are exchanged.")


def _find_order(seen: Seen, parts: Sequence[_Part], wrong: Sequence[_Part]) -> Relation | None:
    for part in wrong:
        pair = _numbers_of(part)
        if pair is None or pair[0].numel() != pair[1].numel() or pair[0].numel() < 2:
            return None
        if difference(pair[0].flatten().sort().values, pair[1].flatten().sort().values) is not None:
            return None
    same = all(pair[0].shape == pair[1].shape for pair in map(_numbers_of, wrong) if pair is not None)
    how = "in another order" if same else "in another shape"
    return Relation("another-order", f"{_name_of(wrong)} has the right numbers, {how}.")


def _find_shift(seen: Seen, parts: Sequence[_Part], wrong: Sequence[_Part]) -> Relation | None:
    """Find a list, such as that of losses, whose values come one place late or early."""
    for shift, words in ((1, "one step late"), (-1, "one step early")):
        found = []
        for part in wrong:
            pair = _numbers_of(part)
            if not isinstance(part.expected, list) or pair is None or pair[0].shape != pair[1].shape:
                return None
            expected, got = pair if shift == 1 else pair[::-1]
            found.append(len(got) > 2 and difference(expected[:-1], got[1:]) is None)
        if all(found):
            return Relation("a-step-off", f"{_name_of(wrong)} has the right values {words}.")
    return None


# ---- only


def _find_first_step(seen: Seen, parts: Sequence[_Part], wrong: Sequence[_Part]) -> Relation | None:
    for part in wrong:
        pair = _numbers_of(part)
        if not isinstance(part.expected, list) or pair is None or pair[0].shape != pair[1].shape:
            continue
        right = [difference(a, b) is None for a, b in zip(*pair, strict=True)]
        first = right.index(False)
        if first and len(right) > 1:
            before = f"{part.at}[0]" if first == 1 else f"{part.at}[0] to [{first - 1}]"
            are = "is" if first == 1 else "are"
            return Relation(
                "right-at-first",
                f"{before} {are} right, and [{first}] is the first that is not: what happens between them?",
            )
    return None


def _find_ranks(seen: Seen, parts: Sequence[_Part], wrong: Sequence[_Part]) -> Relation | None:
    everybody, bad = range(len(seen.expected)), sorted({part.rank for part in wrong})
    good = [rank for rank in everybody if rank not in bad]
    if not good:
        return None
    return Relation(
        "some-ranks", f"{_list(good)} {'is' if len(good) == 1 else 'are'} right, {_list(bad, low=True)} not."
    )


def _list(ranks: Sequence[int], low: bool = False) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word if low else word.capitalize()} {', '.join(map(str, ranks))}"


def _find_sections(seen: Seen, parts: Sequence[_Part], wrong: Sequence[_Part]) -> Relation | None:
    bad = list(dict.fromkeys(part.at for part in wrong))
    good = [name for name in dict.fromkeys(part.at for part in parts) if name not in bad]
    if not good:
        return None
    some = ", ".join(good[:3]) + (" and more" if len(good) > 3 else "")
    these = ", ".join(bad[:3]) + (" and more" if len(bad) > 3 else "")
    return Relation("some-parts", f"Right on every rank: {some}. Wrong: {these}.")


def _find_sizes(case: Case, passed: Sequence[Case]) -> Relation | None:
    if not passed:
        return None
    before = passed[-1]
    other = [name for name in case.sizes if case.sizes[name] != before.sizes.get(name)]
    if case.ranks != before.ranks:
        other.insert(0, "ranks")
    words = f"It is right on {before}, and wrong on {case}"
    return Relation(
        "other-sizes", f"{words}: what changes with {' and '.join(other)}?" if other else f"{words}."
    )


# ---- the parts of results: tensors, numbers and lists in dicts and lists, right and wrong ones side by side


@dataclass(frozen=True)
class _Part:
    """A part of a rank's results, such as one tensor of a dict, that is wrong."""

    rank: int
    at: str
    expected: Any
    got: Any


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


def _flat(value: Any) -> Tensor | None:
    """Return a part's numbers, float64; None if it is something else."""
    import torch

    if is_tensor(value):
        return value.detach().to(torch.float64)
    if isinstance(value, bool) or value is None or isinstance(value, str | dict):
        return None
    try:
        return torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError):
        return None


def _numbers_of(part: _Part) -> tuple[Tensor, Tensor] | None:
    """Return the expected numbers and the answer's, float64; None if one of them is no tensor, number or list."""
    expected, got = _flat(part.expected), _flat(part.got)
    return None if expected is None or got is None else (expected, got)


def _name_of(parts: Sequence[_Part]) -> str:
    """Return what is wrong, in words: the name of the part if there is one part only."""
    names = {part.at for part in parts}
    return names.pop() or "What you got" if len(names) == 1 else "What is wrong"
