"""How a format's values are written: Syntax, and JSON and YAML, whose nested keys are joined by dots here."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from mpkit.common.size_limits import read_json
from mpkit.plan.formats.request import ExportRequest


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


@lru_cache(1)
def tables() -> dict[str, Any]:
    """Return the tables of formats.toml."""
    return tomllib.loads(Path(__file__).with_name("formats.toml").read_text("utf-8"))


def agree(values: dict[str, Any], name: str, value: Any) -> None:
    """Add a value; where the text says two of a name, both are in its place, and no key takes that.

    >>> values = {"tp": 2}
    >>> agree(values, "tp", 4)
    >>> values
    {'tp': '2 and also 4'}
    """
    before = values.setdefault(name, value)
    if before != value and " and also " not in str(before):
        values[name] = f"{shorten(before)} and also {shorten(value)}"


def shorten(value: Any) -> str:
    """Return a value as an error shows it: its beginning, if it is long.

    >>> shorten([1, 2]), shorten(16**5000)
    ('[1, 2]', 'a number of 20001 bits')
    """
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


DEEPEST = 50
"""Levels of mappings."""


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
    return flat(read_json(plain, unique=True))


def _dump_json(page: Page) -> str:
    return json.dumps(_nested(page.values), indent=2) + "\n"


def _annotate_json(page: Page) -> str:
    return "\n".join(_add_comments(_dump_json(page).splitlines(), page, "//", 1, 44))


# ---- YAML


def _load_yaml(text: str) -> dict[str, Any]:
    """Read YAML without aliases: one can stand for more than any memory holds."""
    try:
        yaml = import_module("yaml")
    except ImportError as error:
        raise ImportError(f"YAML is read by PyYAML ({error}):\n    pip install pyyaml") from None
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > DEEPEST:
                why = f"it is nested more than {DEEPEST} deep" if depth > DEEPEST else "an alias is not read"
                raise ValueError(f"line {event.start_mark.line + 1}: {why}: write the value itself")
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
