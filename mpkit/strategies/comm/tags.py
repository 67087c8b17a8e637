"""Tags, which distinguish messages between the same two ranks."""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["tag_number"]

LIMIT = 1_000_000


@lru_cache(4096)
def tag_number(tag: int | str) -> int:
    """Return the integer that backends use for a tag; different tags have different integers.

    >>> tag_number(7), tag_number("A7"), tag_number("F3")
    (7, 1000007, 6000003)

    Raises:
        ValueError: the tag is neither an integer from 0 to 999,999 nor a capital letter followed by one.
    """
    letter, number = "", tag
    if isinstance(tag, str):
        match = re.fullmatch(r"([A-Z]?)(\d{1,6})", tag)
        if match is None:
            raise ValueError(
                f"tag={tag!r}: a tag is an integer, or a capital letter and an integer, such as 'F3'"
            )
        letter, number = match[1], int(match[2])
    assert isinstance(number, int)
    if not 0 <= number < LIMIT:
        raise ValueError(f"tag={tag!r}: the integer of a tag goes from 0 to {LIMIT - 1:,}")
    return (ord(letter) - ord("A") + 1) * LIMIT + number if letter else number
