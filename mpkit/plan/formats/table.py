"""The formats: rows of formats.toml, with the code that a framework needs beside them.

What is written, what is read and what cannot be said follows from the rows.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.syntax import Page, Syntax, Word, shorten
from mpkit.plan.kinds import whole

__all__ = [
    "LARGEST",
    "RANKS",
    "Fields",
    "Format",
    "FormatCode",
    "FormatKey",
    "Values",
    "bool_of",
    "number_of",
]

LARGEST = 2**40
"""The largest number that is read: elements of a bucket, or tokens of a batch, are no more."""
RANKS = "ranks"
"""Among the values of a file: the ranks that the caller of `Plan.read` says, since the file may not."""
KNOWN: Mapping[str, Any] = {"__builtins__": {}, "max": max, "round": round}
"""What the expressions of formats.toml can call."""

Values = dict[str, Any]
Fields = dict[str, Any]
Reader = Callable[[Any], Mapping[str, Any]]


def number_of(value: Any) -> int:
    """Return a whole number of 1 or more that is written as a number or as text.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, Word) and value.reason:
        raise ValueError(value.reason)
    found = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else whole(value)
    if found is None or not 1 <= found <= LARGEST:
        raise ValueError(
            "a whole number, 1 or more, such as 4" + " (up to 2**40)" * bool(found and found > 1)
        )
    return found


def bool_of(value: Any) -> bool:
    """Return a truth value that is written as such or as text.

    Raises:
        ValueError: it is none.
    """
    words = {True: ("true", "1", "yes", "on", "y", "t"), False: ("false", "0", "no", "off", "n", "f")}
    found = next((truth for truth, said in words.items() if str(value).lower() in said), None)
    if found is None:
        raise ValueError("true or false")
    return found


@dataclass(frozen=True)
class FormatCode:
    """What a format needs beside its rows.

    Attributes:
        finish: completes the fields that keys said alone by what several keys say together; it may add notes.
        check: raises ValueError if the framework would refuse the plan.
        names: what expressions of its rows know of the plan, beside its fields.
        readers: the functions that rows name with "@".
        body: the text of a page, without its head, in a script or a module.
    """

    finish: Callable[[Values, Fields, list[str]], Fields] = lambda values, fields, notes: fields
    check: Callable[[ExportRequest], None] = lambda asked: None
    names: Callable[[ExportRequest], Mapping[str, Any]] = lambda asked: {}
    readers: Mapping[str, Reader] = field(default_factory=dict)
    body: Callable[[Page], str] = lambda page: ""


@dataclass(frozen=True)
class FormatKey:
    """A key of a format; formats.toml says what its columns are.

    Attributes:
        name: its name; a nested one is joined by dots.
        written: an expression for the value that a plan has.
        says: what a value says of a plan.
        comment: what it means, in our words.
        reader: the function that reads it, if `says` names one.
    """

    name: str
    written: str
    says: str
    comment: str
    reader: Reader | None = None

    @cached_property
    def _code(self) -> CodeType:
        return compile(self.written, f"<formats.toml: {self.name}>", "eval")

    @cached_property
    def choices(self) -> dict[Any, Any]:
        """Their words by ours, if there are few; "" is ours for one that says nothing."""
        if ":" not in self.says:
            return {}
        words = (word.partition("=") for word in self.says.partition(":")[2].split())
        return {_plain(theirs or ours): _plain(ours) for ours, _, theirs in words}

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The fields of a Plan that it is about."""
        first, *rest = self.says.partition(":")[0].split() or [""]
        if first == "!":
            return ()
        if first in ("if", "bool", "int", "") or first.startswith("@"):
            return tuple(word.partition("=")[0] for word in rest)
        return (first, *(word.partition("=")[0] for word in rest if "=" in word))

    def write(self, names: Mapping[str, Any]) -> Any:
        """Return the value for a plan of which these names are known; None leaves the key out."""
        if not self.written:
            return None
        said = self._theirs(names)
        return said if self.written == "*" else eval(self._code, {**KNOWN}, {**names, "it": said})

    def _theirs(self, names: Mapping[str, Any]) -> Any:
        """Return their word for the plan's field, if the key has one."""
        if not self.fields or self.says.startswith(("@", "bool")):
            return None
        ours = names[self.fields[0]]
        if self.says.startswith("if"):
            return True if str(ours) == self.says.partition("=")[2] else None
        if not self.choices:
            return ours
        return next((theirs for theirs, one in self.choices.items() if one == ours), None)

    def read(self, value: Any) -> Mapping[str, Any]:
        """Return the fields of a Plan that a value says.

        Raises:
            ValueError: the key cannot have it.
        """
        kind, _, rest = self.says.partition(" ")
        if not kind:
            return {}
        if kind == "!":
            raise ValueError(rest)
        if isinstance(value, Word) and value.reason and not self.reader:
            raise ValueError(value.reason)
        if self.reader is not None:
            return self.reader(value)
        if kind == "int":
            number_of(value)
            return {}
        if kind == "bool":
            said = bool_of(value)
            return {rest: said} if rest else {}
        if kind == "if":
            name, _, ours = rest.partition("=")
            return {name: True if ours == "True" else _plain(ours)} if bool_of(value) else {}
        if self.choices:
            return self._read_choice(value)
        words = rest.split()
        if f"!{value}" in words:
            return {}
        return {kind: number_of(value)} | dict(word.split("=") for word in words if "=" in word)

    def _read_choice(self, value: Any) -> Mapping[str, Any]:
        ours = {str(theirs).lower(): one for theirs, one in self.choices.items()}
        word = "no" if value is False and "no" in ours else str(value).lower()  # YAML's no without quotes
        if word not in ours:
            raise ValueError(f"one of {', '.join(map(str, self.choices))}")
        return {} if ours[word] == "" else {self.fields[0]: ours[word]}


def _plain(word: str) -> Any:
    return int(word) if word.isdecimal() else word


@dataclass(frozen=True)
class Format:
    """A framework's configuration.

    Attributes:
        name: what `Plan.to` calls it.
        title: what its users call it, and which file it is.
        syntax: how its values are written.
        keys: the keys that carry a plan, in the order of the file.
        code: what it needs beside its rows.
        reasons: why a field cannot be said, where that is more than that there is no key.
        otherwise: the reason for a field that has none.
        common: keys that other programs have too: by them alone no file is recognized.
    """

    name: str
    title: str
    syntax: Syntax
    keys: tuple[FormatKey, ...]
    code: FormatCode
    reasons: Mapping[str, str]
    otherwise: str
    common: frozenset[str]

    def values_of(self, asked: ExportRequest) -> Values:
        """Return what is written, by key."""
        plan = asked.plan
        known = {
            **vars(plan),
            **vars(asked),
            "mesh": plan.mesh,
            "ranks": plan.ranks,
            **self.code.names(asked),
        }
        found = ((key.name, key.write(known)) for key in self.keys)
        return {name: value for name, value in found if value is not None}

    def fields_of(self, values: Mapping[str, Any], notes: list[str], ranks: int | None = None) -> Fields:
        """Return the fields of a Plan that values say, and add notes about what a Plan says differently.

        `ranks`: how many there are, if the caller says so.

        Raises:
            ValueError: a value is none that the key can have.
        """
        known = {key.name: key for key in self.keys}
        order = {name: at for at, name in enumerate(known)}  # of two keys of a field the later one counts
        fields: Fields = {}
        kept: Values = {} if ranks is None else {RANKS: ranks}
        for name, value in sorted(values.items(), key=lambda item: order.get(item[0], -1)):
            if value is None or value == {}:
                continue
            inner = next((key for key in known if name not in known and key.startswith(f"{name}.")), "")
            if inner:
                raise ValueError(
                    f"{self.name}: {name} = {shorten(value)}: it holds settings, such as {inner}"
                )
            if name not in known:
                continue
            if value == "auto" and not name.startswith("--"):
                notes.append(f"{name} is 'auto', which the framework fills in: not read")
                continue
            kept[name] = value
            self._add(known[name], value, fields, notes)
        fields = self.code.finish(kept, fields, notes)
        if fields.get("sequence_parallel") and fields.get("tp", 1) == 1:
            del fields["sequence_parallel"]
            notes.append("sequence parallelism changes nothing without tensor parallelism: left out")
        return fields

    def _add(self, key: FormatKey, value: Any, fields: Fields, notes: list[str]) -> None:
        """Add what a key says alone."""
        try:
            said = key.read(value)
        except ValueError as error:
            raise ValueError(f"{self.name}: {key.name} = {shorten(value)}: {error}") from None
        if {fields.get("precision"), said.get("precision")} == {"bf16", "fp16"}:
            raise ValueError(f"{self.name}: bf16 and fp16 are both enabled; the framework takes one of them")
        fields |= said
        notes += [value.note] if isinstance(value, Word) and value.note else []

    def why_not(self, field: str) -> str:
        """Say why a field's value cannot be said."""
        if field in self.reasons or self.otherwise:
            return self.reasons.get(field, self.otherwise)
        key = next((key for key in self.keys if field in key.fields), None)
        if key is None:
            return f"{self.name} has no key for it"
        if key.choices:
            return f"{key.name} is one of {', '.join(map(str, key.choices))}"
        return f"{key.name} does not go with this plan"


@lru_cache(1)
def tables() -> dict[str, Any]:
    """Return the tables of formats.toml."""
    return tomllib.loads(Path(__file__).with_name("formats.toml").read_text("utf-8"))


def rows_of(name: str) -> Iterator[list[str]]:
    """Yield a table's rows, and in place of another table's name its rows, which "-unwritten" reads only."""
    table, _, unwritten = name.partition("-")
    for row in tables()[table]["rows"]:
        for key, written, says, comment in [row] if isinstance(row, list) else rows_of(row):
            yield [key, "" if unwritten else written, says, comment]
