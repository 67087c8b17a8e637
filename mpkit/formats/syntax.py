"""How a format's values are written: Syntax, and JSON and YAML, whose nested keys are joined by dots here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from mpkit.formats.asked import Asked

__all__ = ["JSON", "YAML", "Page", "Syntax", "flat", "nested"]


@dataclass(frozen=True)
class Page:
    """What is written: values and comments by key, and lines for the head of the file."""

    asked: Asked
    values: Mapping[str, Any]
    comments: Mapping[str, str]
    header: Sequence[str]


@dataclass(frozen=True)
class Syntax:
    """A way to write values.

    Attributes:
        dump: the text of a page.
        load: the values in a text, by key; ValueError if it is not written in this way.
        annotate: the text with comments, where the text itself has none.
    """

    dump: Callable[[Page], str]
    load: Callable[[str], dict[str, Any]]
    annotate: Callable[[Page], str]


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping of mappings that keys with dots stand for.

    >>> nested({"a": 1, "b.c": 2, "b.d.e": 3})
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


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a mapping of mappings as one mapping, its keys joined by dots.

    >>> flat({"a": 1, "b": {"c": 2, "d": {"e": 3}}})
    {'a': 1, 'b.c': 2, 'b.d.e': 3}
    """
    values: dict[str, Any] = {}
    for name, value in tree.items():
        inner = isinstance(value, Mapping) and value
        values |= flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return values


def _mapping(tree: Any, what: str) -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        raise ValueError(f"a mapping of keys is expected, and the {what} is {str(tree)[:60]!r}")
    return flat(tree)


# ---- JSON


def _load_json(text: str) -> dict[str, Any]:
    return _mapping(json.loads(text), "JSON")


def _dump_json(page: Page) -> str:
    return json.dumps(nested(page.values), indent=2) + "\n"


def _annotated_json(page: Page) -> str:
    """Return the text with a comment beside each line that has a key."""
    names = _names(nested(page.values))
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
        return _mapping(yaml.safe_load(text), "YAML")
    except yaml.YAMLError as error:
        raise ValueError(f"this is no YAML: {error}") from None


def _dump_yaml(page: Page) -> str:
    lines = [f"# {line}".rstrip() for line in page.header]
    return "\n".join([*lines, *_yaml_lines(nested(page.values), page.comments)]) + "\n"


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


JSON = Syntax(_dump_json, _load_json, _annotated_json)
YAML = Syntax(_dump_yaml, _load_yaml, _dump_yaml)
