"""How a format's values are written: Syntax, and JSON and YAML, whose nested keys are joined by dots here.

Word is a value of a text, with what is open about it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from mpkit.common.size_limits import read_json
from mpkit.plan.formats.request import ExportRequest

__all__ = ["JSON", "YAML", "Page", "Syntax", "Word", "agree", "flat", "is_json", "nest_keys", "shorten"]

# ---- values of a text, and as errors show them, however long they are


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


# ---- texts

MOST_KEYS, MOST_EVENTS, DEEPEST = 100_000, 20_000, 50
"""Keys of a mapping, events of YAML (which PyYAML takes a second for), and levels of mappings."""


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


def nest_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping of mappings that keys with dots stand for.

    >>> nest_keys({"a": 1, "b.c": 2, "b.d.e": 3})
    {'a': 1, 'b': {'c': 2, 'd': {'e': 3}}}
    """
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *outer, last = name.split(".")
        inner = tree
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return tree


def flat(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a mapping of mappings as one mapping, its keys joined by dots.

    >>> flat({"a": 1, "b": {"c": 2, "d": {"e": 3}}})
    {'a': 1, 'b.c': 2, 'b.d.e': 3}

    Raises:
        ValueError: it has more keys than a configuration, or mappings are nested more deeply.
    """
    values: dict[str, Any] = {}
    for name, value in _leaves(tree, "", 0):
        values[name] = value
        if len(values) > MOST_KEYS:
            raise ValueError(f"it has more than {MOST_KEYS:,} keys")
    return values


def _leaves(tree: Mapping[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > DEEPEST:
        raise ValueError(f"its mappings are nested more than {DEEPEST} deep")
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{prefix}{name}", value


def _read_mapping(tree: Any, what: str) -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        raise ValueError(f"a mapping of keys is expected, and the {what} is of type {type(tree).__name__}")
    return flat(tree)


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
    return _read_mapping(read_json(plain, MOST_KEYS, unique=True), "JSON")


def _dump_json(page: Page) -> str:
    return json.dumps(nest_keys(page.values), indent=2) + "\n"


def _annotated_json(page: Page) -> str:
    """Return the text with a comment beside each line that has a key."""
    names = _names(nest_keys(page.values))
    lines = [f"// {line}" for line in page.header]
    for line in _dump_json(page).splitlines():
        comment = page.comments.get(next(names), "") if line.lstrip().startswith('"') else ""
        lines.append(f"{line:44} // {comment}" if comment else line)
    return "\n".join(lines)


def _names(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the names of all keys in the order of the text's lines that begin with one."""
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield from ("" for _ in value)


# ---- YAML


def _load_yaml(text: str) -> dict[str, Any]:
    try:
        yaml = import_module("yaml")
    except ImportError as error:
        raise ImportError(f"YAML is read by PyYAML ({error}):\n    pip install pyyaml") from None
    try:
        _check_yaml(yaml, text)
        return _read_mapping(yaml.safe_load(text), "YAML")
    except yaml.YAMLError as error:
        raise ValueError(f"this is no YAML: {error}") from None


def _check_yaml(yaml: Any, text: str) -> None:
    """Check what a text of YAML would become, event by event, before any of it does.

    Raises:
        ValueError: it has aliases, which can stand for more than any memory holds; or tags; or it is too long or deep.
    """
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        where = f"line {event.start_mark.line + 1}"
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(
                f"{where}: *{event.anchor} is an alias, which is not read: write out what it stands for"
            )
        if getattr(event, "tag", None):
            raise ValueError(f"{where}: {event.tag} is a tag, which is not read: write the value alone")
        if depth > DEEPEST or count > MOST_EVENTS:
            raise ValueError(
                f"{where}: a configuration has no more than {DEEPEST} levels and {MOST_EVENTS:,} values"
            )


def _dump_yaml(page: Page) -> str:
    lines = [f"# {line}".rstrip() for line in page.header]
    return "\n".join([*lines, *_yaml_lines(nest_keys(page.values), page.comments)]) + "\n"


def _yaml_lines(tree: Mapping[str, Any], comments: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _yaml_lines(value, comments, f"{prefix}{name}.")
            continue
        line = f"{indent}{name}: {json.dumps(value)}"
        comment = comments.get(f"{prefix}{name}")
        yield f"{line:48} # {comment}" if comment else line


JSON = Syntax("JSON", _dump_json, _load_json, _annotated_json)
YAML = Syntax("YAML", _dump_yaml, _load_yaml, _dump_yaml)
