"""The syntaxes in which formats write their values: JSON, YAML and Python, whose nested keys are joined by dots here.

Python is constants at the head of a module, and the arguments of configuration objects. mpkit parses and never runs it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpkit.common.size_limits import read_json
from mpkit.plan import kinds

if TYPE_CHECKING:
    from mpkit.plan.formats.write import ExportRequest


@dataclass(frozen=True)
class Page:
    """What is written: values and comments by key, and lines for the head of the file."""

    asked: ExportRequest
    values: Mapping[str, Any]
    comments: Mapping[str, str]
    header: Sequence[str]


@dataclass(frozen=True)
class Syntax:
    """A way to write values."""

    name: str
    dump: Callable[[Page], str]
    load: Callable[[str], dict[str, Any]]  # raises a ValueError if the text is not written this way
    annotate: Callable[[Page], str]  # the text with comments, also for JSON, which has none


tables = partial(kinds.tables, "formats/formats")


def agree(values: dict[str, Any], name: str, value: Any) -> None:
    """Add a value; a name with two values in a text gets both, as "2 and also 4", which no key takes."""
    before = values.setdefault(name, value)
    if before != value and " and also " not in str(before):
        values[name] = f"{shorten(before)} and also {shorten(value)}"


def shorten(value: Any) -> str:
    """Return a value as an error shows it: its beginning, if it is long; Python has no text of integers this long.

    >>> shorten(16**5000)
    'a number of 20001 bits'
    """
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


DEEPEST = 50  # levels of mappings


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return a mapping of mappings as one mapping, its keys joined by dots: {"b": {"c": 2}} as {"b.c": 2}."""
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
    """Yield the head of a file and its lines, each with the comment of its key, whose level follows from the indent."""
    yield from (f"{mark} {line}".rstrip() for line in page.header)
    path: list[str] = []
    for line in lines:
        if key := re.match(r'( *)"?([\w.-]+)"?:', line):
            path[len(key[1]) // 2 - outermost :] = [key[2]]
        comment = page.comments.get(".".join(path)) if key else None
        yield f"{line:{width}} {mark} {comment}" if comment else line


# ---- JSON, also with the comments and trailing commas that DeepSpeed (Hjson) takes

_COMMENT = re.compile(r'("(?:[^"\\]++|\\.)*+"?)|//[^\n]*|#[^\n]*|/\*(?:[^*]++|\*(?!/))*+(?:\*/)?', re.DOTALL)
_LAST_COMMA = re.compile(r'("(?:[^"\\]++|\\.)*+"?)|,(?=\s*+[}\]])', re.DOTALL)


def _plain_json(text: str) -> str:
    """Return the text without its comments; line numbers stay."""
    return _COMMENT.sub(lambda found: found[1] or "\n" * found[0].count("\n"), text)


def is_json(text: str) -> bool:
    """Return whether a text is an object of JSON, perhaps after comments."""
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
    """Read YAML without aliases, a few of which can stand for more than any memory holds."""
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


# ---- Python


def python_code(body: Callable[[Page], str], classes: Mapping[str, str]) -> Syntax:
    """Return the syntax of Python code, of which `body` makes the lines after the docstring.

    `classes` has the class of each section, which keys begin with, such as {"training": "TrainingConfig"}.
    """

    def dump(page: Page) -> str:
        title, *rest = page.header
        head = "\n".join([title, "", *rest]).rstrip().replace("\\", "\\\\").replace('"""', "'''")
        return f'"""{head}\n"""\n\n{body(page)}\n'

    def load(text: str) -> dict[str, Any]:
        try:
            values = _module_values(ast.parse(text), {name: section for section, name in classes.items()})
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = str(error) or "it is nested too deeply"
            raise ValueError(f"this is no Python that can be read: {why}") from None
        if not values:
            raise ValueError("there is no assignment of a constant or of a configuration")
        return values

    return Syntax("Python", dump, load, dump)


def _module_values(tree: ast.Module, sections: Mapping[str, str]) -> dict[str, Any]:
    r"""Return what a module assigns outside of functions, and the arguments of its configuration objects.

    Nothing is calculated: any other expression stays as its text, which no key takes.

    >>> text = "TP = 2\nRANKS: int = 8\nif x: RANKS = 3\nc = Config(tp=TP, pp=degree(4))"
    >>> _module_values(ast.parse(text), {"Config": "c"})
    {'TP': 2, 'RANKS': "8 and also 'what line 3 makes of it'", 'c.tp': 2, 'c.pp': 'degree()'}
    """
    known: dict[str, Any] = {}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        plain = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                value = _node_value(plain, known) if plain else f"what line {node.lineno} makes of it"
                agree(known, node.id, value)
    values = {name: value for name, value in known.items() if _class_name(value) not in sections}
    calls: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _class_name(_node_value(node, {}))) in sections:
            if calls.setdefault(name, ast.unparse(node)) != ast.unparse(node):
                raise ValueError(f"its {name}s differ: Plan.read of the text of the one that is meant")
            if node.args or not all(keyword.arg for keyword in node.keywords):
                raise ValueError(f"write the arguments of {name} by name")
            section = sections[name]
            values |= {f"{section}.{each.arg}": _node_value(each.value, known) for each in node.keywords}
    return values


def _class_name(value: Any) -> str:
    return str(value).removesuffix("()").rpartition(".")[2]


def _node_value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Return the value of an expression, or its text if it has to be calculated: of a call without the arguments."""
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return f"{ast.unparse(node.func)}()" if isinstance(node, ast.Call) else f"{ast.unparse(node):.60}"


def assignments(page: Page, classes: Mapping[str, str]) -> str:
    """Return constants with their comments, and a call for each section; values that end in ".Config()" are calls."""
    lines: list[str] = []
    inside = ""
    for name, value in page.values.items():
        section, _, key = name.rpartition(".")
        if inside and section != inside:
            lines.append(")")
        if section and section != inside:
            lines.append(f"{section} = {classes[section]}(")
        inside = section
        text = json.dumps(value) if isinstance(value, str) else repr(value)
        text = value if text.endswith('.Config()"') else text
        line = f"    {key}={text}," if section else f"{name} = {text}"
        lines.append(f"{line:48} # {page.comments[name]}")
    return "\n".join([*lines, *([")"] if inside else [])])
