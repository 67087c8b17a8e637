"""Make strings from outside (names of layers, notebooks, students, the output of ranks) safe to show.

A terminal obeys escape sequences, XML allows no control characters, a browser takes "<" for a tag, and characters
that set the writing direction make a line read as something else. All code that shows such a string calls one of
these functions.
"""

import html
import re

_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tab and newline
    "\u202a-\u202e\u2066-\u2069"  # characters that set the writing direction
    "\ud800-\udfff\ufffe\uffff]"  # lone surrogates and noncharacters: not in UTF-8, not in XML
)


def visible(text: str) -> str:
    r"""Return the text with the characters that a terminal obeys, or an XML reader rejects, escaped.

    >>> print(visible("a\x1b[31mb\x00"))
    a\x1b[31mb\x00
    """
    return _INVISIBLE.sub(_written_out, text)


def escape(text: str, quote: bool = True) -> str:
    r"""Return the text as HTML or XML: `html.escape` of what is `visible`.

    >>> print(escape("<b>\x1b"))
    &lt;b&gt;\x1b
    """
    return html.escape(visible(text), quote)


def _written_out(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
