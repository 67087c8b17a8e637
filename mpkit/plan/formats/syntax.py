"""How a format's values are written: Syntax, and JSON and YAML, whose nested keys are joined by dots here.

Word is a value of a text, with what is open about it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from mpkit.common.size_limits import read_json
from mpkit.plan.formats.request import ExportRequest

__all__ = ["JSON", "YAML", "Page", "Syntax", "Word", "agree", "flat", "is_json", "shorten"]


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
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


# ---- texts


@dataclass(frozen=True)
class Page:
    """What is written: values and comments by key, and lines for the head of the file."""

    asked: ExportRequest
    values: Mapping[str, Any]
    comments: Mapping[str, str]
    header: Sequence[str]


@dataclass(frozen=True)
class Syntax:
    """A way to write values.

    Attributes:
        name: what it is called.
        dump: the text of a page.
        load: the values in a text, by key; ValueError if it is not written in this way.
        annotate: the text with comments, where the text itself has none.
    """

    name: str
    dump: Callable[[Page], str]
    load: Callable[[str], dict[str, Any]]
    annotate: Callable[[Page], str]


DEEPEST, MOST = 50, 20_000
"""Levels of mappings, and events of YAML, which PyYAML takes a second for."""


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return a mapping of mappings as one mapping, its keys joined by dots.

    >>> flat({"a": 1, "b": {"c": 2, "d": {"e": 3}}})
    {'a': 1, 'b.c': 2, 'b.d.e': 3}

    Raises:
        ValueError: it is no mapping, or mappings are nested too deeply.
    """
    if not isinstance(tree, Mapping):
        raise ValueError(f"a mapping of keys is expected, and this is of type {type(tree).__name__}")
    if prefix.count(".") > DEEPEST:
        raise ValueError(f"its mappings are nested more than {DEEPEST} deep")
    values: dict[str, Any] = {}
    for name, value in tree.items():
        nested = isinstance(value, Mapping) and value
        values |= flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return values


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping of mappings that keys with dots stand for; the opposite of `flat`."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *outer, last = name.split(".")
        inner = tree
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return tree


def _add_comments(lines: Iterable[str], page: Page, mark: str, outermost: int, width: int) -> Iterator[str]:
    """Yield the head of a file and its lines, each with the comment of its key, whose level its indent says."""
    yield from (f"{mark} {line}".rstrip() for line in page.header)
    path: list[str] = []
    for line in lines:
        if key := re.match(r'( *)"?([\w.-]+)"?:', line):
            path[len(key[1]) // 2 - outermost :] = [key[2]]
        comment = page.comments.get(".".join(path)) if key else None
        yield f"{line:{width}} {mark} {comment}" if comment else line


# ---- JSON, also with the comments and commas at the end of a list that DeepSpeed (Hjson) takes

_COMMENT = re.compile(r'("(?:[^"\\]++|\\.)*+"?)|//[^\n]*|#[^\n]*|/\*(?:[^*]++|\*(?!/))*+(?:\*/)?', re.DOTALL)
_LAST_COMMA = re.compile(r'("(?:[^"\\]++|\\.)*+"?)|,(?=\s*+[}\]])', re.DOTALL)


def _plain_json(text: str) -> str:
    """Return the text without its comments, each line at its place."""
    return _COMMENT.sub(lambda found: found[1] or "\n" * found[0].count("\n"), text)


def is_json(text: str) -> bool:
    """Return whether a text begins as an object of JSON does, perhaps after comments."""
    return text.lstrip()[:1] in ("{", "/", "#") and _plain_json(text).lstrip()[:1] == "{"


def _load_json(text: str) -> dict[str, Any]:
    plain = _LAST_COMMA.sub(lambda found: found[1] or "", _plain_json(text))
    return flat(read_json(plain, MOST, unique=True))


def _dump_json(page: Page) -> str:
    return json.dumps(_nested(page.values), indent=2) + "\n"


def _annotate_json(page: Page) -> str:
    return "\n".join(_add_comments(_dump_json(page).splitlines(), page, "//", 1, 44))


# ---- YAML


def _load_yaml(text: str) -> dict[str, Any]:
    """Read YAML, after each of its events was seen: an alias can stand for more than any memory holds."""
    try:
        yaml = import_module("yaml")
    except ImportError as error:
        raise ImportError(f"YAML is read by PyYAML ({error}):\n    pip install pyyaml") from None
    depth = 0
    try:
        for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
            where = f"line {event.start_mark.line + 1}"
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None):
                what = "a tag" if getattr(event, "tag", None) else "an alias"
                raise ValueError(f"{where}: {what} is not read: write the value itself")
            if depth > DEEPEST or count > MOST:
                raise ValueError(f"{where}: a configuration has at most {DEEPEST} levels and {MOST:,} values")
        return flat(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ValueError(f"this is no YAML: {error}") from None


def _dump_yaml(page: Page) -> str:
    return "\n".join([*_add_comments(_yaml_lines(_nested(page.values)), page, "#", 0, 48), ""])


def _yaml_lines(tree: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _yaml_lines(value, indent + "  ")
        else:
            yield f"{indent}{name}: {json.dumps(value)}"


JSON = Syntax("JSON", _dump_json, _load_json, _annotate_json)
YAML = Syntax("YAML", _dump_yaml, _load_yaml, _dump_yaml)
