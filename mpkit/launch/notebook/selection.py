"""Which ranks of a session a cell runs on, as it is written behind `%%ranks`."""

from __future__ import annotations

import re

__all__ = ["is_selection", "ranks_of", "spelt"]

PART = re.compile(r"(-?\d+)?(:(-?\d+)?)?")


def is_selection(text: str) -> bool:
    """Return whether a text is meant to choose ranks.

    >>> [is_selection(text) for text in ("0,2", "1:", "all", "2,", "x + 1", "")]
    [True, True, True, True, False, False]
    """
    text = text.strip()
    return text == "all" or bool(text and re.fullmatch(r"[-\d:,\s]+", text))


def ranks_of(text: str, world_size: int) -> list[int]:
    """Return the ranks that a text chooses: numbers and ranges as in Python, "all", or a number and a comma.

    >>> ranks_of("0,2", 4), ranks_of("1:", 4), ranks_of("2,", 4), ranks_of("-1", 4), ranks_of("all", 2)
    ([0, 2], [1, 2, 3], [2], [3], [0, 1])

    Raises:
        ValueError: there is no such rank.
    """
    if text.strip() == "all":
        return list(range(world_size))
    chosen: set[int] = set()
    for one in filter(None, re.split(r"[,\s]+", text.strip())):
        if not PART.fullmatch(one):
            raise ValueError(f"{one!r} chooses no ranks: 0,2 and 1:3 and all do")
        if ":" in one:
            start, _, stop = one.partition(":")
            chosen.update(
                range(world_size)[slice(int(start) if start else None, int(stop) if stop else None)]
            )
            continue
        number = int(one)
        if not -world_size <= number < world_size:
            raise ValueError(
                f"there is no rank {number}: this session has ranks 0 to {world_size - 1}; `%ranks_reset {number + 1}` "
                "starts another with more, without the variables of this one"
            )
        chosen.add(number % world_size)
    if not chosen:
        raise ValueError(f"{text.strip()!r} chooses no ranks of {world_size}: 0,2 and 1:3 and all do")
    return sorted(chosen)


def spelt(ranks: list[int]) -> str:
    """Return a label such as "rank 0" or "ranks 0-3".

    >>> spelt([1]), spelt([0, 1, 2, 3]), spelt([0, 2])
    ('rank 1', 'ranks 0-3', 'ranks 0,2')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {','.join(map(str, ranks))}"
