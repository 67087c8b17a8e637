"""Word: a value of a text, with what is open about it; and values shown in errors, however long they are."""

from __future__ import annotations

from typing import Any

__all__ = ["Word", "agree", "shorten"]


class Word(str):
    """A value as the text has it.

    Attributes:
        reason: why nobody can tell the value from the text; "" if one can.
        note: what was assumed to tell it; "" if nothing.
    """

    reason: str
    note: str

    def __new__(cls, text: str, *, reason: str = "", note: str = "") -> Word:
        """Return the text with what is open about it."""
        word = super().__new__(cls, text)
        word.reason, word.note = reason, note
        return word


def agree(values: dict[str, Any], name: str, value: Any) -> None:
    """Add a value; if there is another one of that name, none can be told from the text.

    >>> values = {"tp": "2"}
    >>> agree(values, "tp", "4")
    >>> values["tp"].reason
    "the text says both '2' and '4': write one of them"
    """
    before = values.setdefault(name, value)
    if before != value and not (isinstance(before, Word) and before.reason):
        both = f"{shorten(before)} and {shorten(value)}"
        values[name] = Word(both, reason=f"the text says both {both}: write one of them")


def shorten(value: Any) -> str:
    """Return a value as an error shows it: its beginning, if it is long.

    >>> shorten([1, 2]), shorten(16**5000)
    ('[1, 2]', 'a number of 20001 bits')
    """
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str | int | float | None):
        return repr(value) if len(str(value)) <= 80 else f"{str(value)[:80]!r}..."
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
