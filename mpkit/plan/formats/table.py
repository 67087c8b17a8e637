"""A format: a table of formats.toml, with the code that a framework needs beside it.

What is written, what is read and what cannot be said follows from the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from types import CodeType
from typing import TYPE_CHECKING, Any

from mpkit.plan.formats.syntax import Syntax, shorten, tables
from mpkit.plan.kinds import parts_of, whole
from mpkit.plan.rules import call_of

if TYPE_CHECKING:
    from mpkit.plan.formats.write import ExportRequest

LARGEST = 2**40  # elements of a bucket or tokens of a batch: no number in a file is larger
RANKS = "ranks"  # the key, among the values of a file, of the ranks that the caller of `Plan.read` gives
KNOWN: Mapping[str, Any] = {"__builtins__": {}, "max": max, "round": round}  # for expressions of formats.toml
TRUTHS = {True: ("true", "1", "yes", "on", "y", "t"), False: ("false", "0", "no", "off", "n", "f")}

Values = dict[str, Any]
Fields = dict[str, Any]


def number_of(value: Any) -> int:
    """Return a whole number of 1 or more that a file writes as a number (5e8, too) or as text.

    >>> number_of("$TP")
    Traceback (most recent call last):
    ValueError: a whole number, 1 or more, such as 4; the text assigns it nowhere, several times, or in a branch
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else whole(value)
    if number is None or not 1 <= number <= LARGEST:
        raise ValueError(
            "a whole number, 1 or more, such as 4"
            + " (up to 2**40)" * bool(number and number > 1)
            + "; the text assigns it nowhere, several times, or in a branch" * ("$" in str(value)[:80])
        )
    return number


def bool_of(value: Any) -> bool:
    """Return the truth value that a file writes as such or as text."""
    for truth, words in TRUTHS.items():
        if str(value).lower() in words:
            return truth
    raise ValueError("true or false")


@dataclass(frozen=True)
class FormatKey:
    """A key of a format: a row of formats.toml, which explains the columns."""

    name: str  # a nested key is joined by dots
    written: str  # an expression for the value that a plan has
    says: str  # what a value says of a plan
    comment: str

    @cached_property
    def _code(self) -> CodeType:
        return compile(self.written, f"<formats.toml: {self.name}>", "eval")

    @cached_property
    def words(self) -> Mapping[Any, Any]:
        """The fields that each of the format's words says, or why mpkit rejects it; "*" is any other word.

        It is empty for a key whose value is a number.
        """
        kind, _, rest = self.says.partition(" ")
        ours, _, value = rest.partition("=")
        if kind == "!":
            return {"*": rest}
        if kind == "if":
            return {True: {ours: value == "True" or _plain(value)}, False: {}}
        if kind == "bool":
            return {said: {rest: said} if rest else {} for said in (True, False)}
        if kind.startswith("#"):
            return dict(tables()["words"][kind[1:]])
        pairs = (word.partition("=") for word in rest.split() if kind.endswith(":"))
        return {
            _plain(theirs or ours): {kind[:-1]: _plain(ours)} if ours else {} for ours, _, theirs in pairs
        }

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The fields of a Plan that its values say."""
        if self.words:
            said = [one for one in self.words.values() if isinstance(one, Mapping)]
            return tuple(dict.fromkeys(field for one in said for field in one))
        first, *rest = self.says.split() or ["int"]
        return () if first == "int" else (first, *(word.partition("=")[0] for word in rest if "=" in word))

    def write(self, names: Mapping[str, Any]) -> Any:
        """Return the value for a plan, given what the expression may name; None leaves the key out."""
        if not self.written:
            return None
        said = names.get(self.fields[0]) if self.fields else None
        if self.words and self.fields:
            said = next((word for word, one in self.words.items() if one == {self.fields[0]: said}), None)
        return said if self.written == "*" else eval(self._code, {**KNOWN}, {**names, "it": said})

    def read(self, value: Any) -> Fields:
        """Return the fields of a Plan that a value says, or raise a ValueError that says which values the key takes."""
        kind, *extra = self.says.split() or [""]
        if kind in ("if", "bool"):
            return {**self.words[bool_of(value)]}
        if not self.words:
            if not kind or f"!{value}" in extra:
                return {}
            number = number_of(value)
            others = (word.split("=") for word in extra if "=" in word)
            return {} if kind == "int" else {kind: number} | dict(others)
        text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        known = {str(word).lower(): said for word, said in self.words.items()}
        word = "no" if value is False and "no" in known else text.strip("\"'").lower()  # YAML's no
        said = known.get(word, known.get("*"))
        if said is None:
            raise ValueError(f"one of {', '.join(map(str, self.words))}")
        if isinstance(said, str):
            raise ValueError(said)
        return {**said}


def _plain(word: str) -> Any:
    return int(word) if word.isdecimal() else word


@dataclass(frozen=True)
class Format:
    """A framework's configuration: its table in formats.toml, and the code that it needs beside its rows.

    `finish` completes the fields that single keys say with what several keys say together, and may add notes.
    """

    name: str  # as `Plan.to` takes it
    syntax: Syntax
    finish: Callable[[Values, Fields, list[str]], Fields]
    # More names for the rows' expressions.
    names: Callable[[ExportRequest], Mapping[str, Any]] = lambda asked: {}

    @property
    def title(self) -> str:
        """What users of the framework call this file."""
        return str(tables()[self.name]["title"])

    @cached_property
    def keys(self) -> Mapping[str, FormatKey]:
        """The keys that carry a plan, by name, in the file's order."""
        return {row[0]: FormatKey(*row) for row in rows_of(self.name)}

    @cached_property
    def common(self) -> frozenset[str]:
        """The keys that other programs have too, so that they do not identify this format."""
        words = tables()[self.name].get("common", [])
        rows = ([row[0] for row in rows_of(word)] if word in tables() else [word] for word in words)
        return frozenset(chain.from_iterable(rows))

    def check(self, asked: ExportRequest) -> None:
        """Raise a ValueError if the framework would reject the plan; it shows a plan that the framework takes."""
        known = {"p": asked.plan, "asked": asked, "call": call_of(asked.plan)}
        for when, says in tables()[self.name].get("refused", ()):
            if eval(when, {**known}):
                parts = parts_of(says, known)
                shown = (one if isinstance(one, str) else call_of(asked.plan, one) for one in parts)
                raise ValueError("".join(shown))

    def values_of(self, asked: ExportRequest) -> Values:
        """Return the values to write, by key."""
        plan = asked.plan
        known = {**vars(plan), **vars(asked), "mesh": plan.mesh, "ranks": plan.ranks, **self.names(asked)}
        for name, expression in tables()[self.name].get("names", {}).items():
            known[name] = eval(expression, {**KNOWN}, known)
        values = ((name, key.write(known)) for name, key in self.keys.items())
        return {name: value for name, value in values if value is not None}

    def fields_of(self, values: Mapping[str, Any], notes: list[str], ranks: int | None = None) -> Fields:
        """Return the fields of a Plan that values say, and add notes about what a Plan says differently.

        `ranks` is their number if the caller of `Plan.read` gives it.
        """
        order = {name: at for at, name in enumerate(self.keys)}  # of two keys of a field the later one counts
        fields: Fields = {}
        kept: Values = {} if ranks is None else {RANKS: ranks}
        for name, value in sorted(values.items(), key=lambda item: order.get(item[0], -1)):
            if value is None or value == {}:
                continue
            if value == "auto" and name in self.keys and not name.startswith("--"):
                notes.append(f"{name} is 'auto', which the framework fills in: not read")
                continue
            inner = next((key for key in self.keys if key.startswith(f"{name}.")), "")
            try:
                if name in self.keys:
                    kept[name] = value
                    said = self.keys[name].read(value)
                    if {fields.get("precision"), said.get("precision")} == {"bf16", "fp16"}:
                        raise ValueError("bf16 and fp16 are both enabled; the framework takes one of them")
                    fields |= said
                elif inner:
                    raise ValueError(f"it holds settings, such as {inner}")
            except ValueError as error:
                raise ValueError(f"{self.name}: {name} = {shorten(value)}: {error}") from None
        fields = self.finish(kept, fields, notes)
        if fields.get("sequence_parallel") and fields.get("tp", 1) == 1:
            del fields["sequence_parallel"]
            notes.append("sequence parallelism changes nothing without tensor parallelism: left out")
        return fields

    def why_not(self, field: str) -> str:
        """Return why the format cannot say a field's value."""
        table = tables()[self.name]
        if field in table.get("cannot", {}) or "otherwise" in table:
            return str(table.get("cannot", {}).get(field) or table["otherwise"])
        key = next((key for key in self.keys.values() if field in key.fields), None)
        if key is None:
            return f"{self.name} has no key for it"
        words = ", ".join(map(str, key.words))
        return f"{key.name} is one of {words}" if words else f"{key.name} does not go with this plan"


def rows_of(name: str) -> Iterator[list[str]]:
    """Yield a table's rows; another table's name stands for its rows, which mpkit only reads after "-unwritten"."""
    table, _, unwritten = name.partition("-")
    for row in tables()[table]["rows"]:
        for key, written, says, comment in [row] if isinstance(row, list) else rows_of(row):
            yield [key, "" if unwritten else written, says, comment]
