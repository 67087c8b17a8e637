"""What is printed, without the breaks of its lines."""

from __future__ import annotations


def unwrapped(shown: object) -> str:
    """The text of a thing with one blank for each run of blanks."""
    return " ".join(str(shown).split())
