"""A format: a table of formats.toml, with the code that a framework needs beside it.

What is written, what is read and what cannot be said follows from the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any

from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.syntax import Syntax, shorten, tables
from mpkit.plan.kinds import parts_of, whole
from mpkit.plan.rules import call_of

LARGEST = 2**40
"""The largest number that is read: elements of a bucket, or tokens of a batch, are no more."""
RANKS = "ranks"
"""Among the values of a file: the ranks that the caller of `Plan.read` says, since the file may not."""
KNOWN: Mapping[str, Any] = {"__builtins__": {}, "max": max, "round": round}
"""What the expressions of formats.toml can call."""
TRUTHS = {True: ("true", "1", "yes", "on", "y", "t"), False: ("false", "0", "no", "off", "n", "f")}

Values = dict[str, Any]
Fields = dict[str, Any]


def number_of(value: Any) -> int:
    """Return a whole number of 1 or more that is written as a number (5e8, too) or as text.

    Raises:
        ValueError: it is none.

    >>> number_of("8"), number_of(5e8)
    (8, 500000000)
    >>> number_of("$TP")
    Traceback (most recent call last):
    ValueError: a whole number, 1 or more, such as 4; the text assigns it nowhere, several times, or in a branch
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    found = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else whole(value)
    if found is None or not 1 <= found <= LARGEST:
        raise ValueError(
            "a whole number, 1 or more, such as 4"
            + " (up to 2**40)" * bool(found and found > 1)
            + "; the text assigns it nowhere, several times, or in a branch" * ("$" in str(value)[:80])
        )
    return found


def bool_of(value: Any) -> bool:
    """Return a truth value that is written as such or as text.

    Raises:
        ValueError: it is none.
    """
    found = next((truth for truth, said in TRUTHS.items() if str(value).lower() in said), None)
    if found is None:
        raise ValueError("true or false")
    return found


@dataclass(frozen=True)
class FormatKey:
    """A key of a format; formats.toml says what its columns are.

    Attributes:
        name: its name; a nested one is joined by dots.
        written: an expression for the value that a plan has.
        says: what a value says of a plan.
        comment: what it means, in our words.
    """

    name: str
    written: str
    says: str
    comment: str

    @cached_property
    def _code(self) -> CodeType:
        return compile(self.written, f"<formats.toml: {self.name}>", "eval")

    @cached_property
    def words(self) -> Mapping[Any, Any]:
        """By a word of theirs, the fields that it says, or why it is refused; "*": all others. None: it is a number."""
        kind, _, rest = self.says.partition(" ")
        ours, _, value = rest.partition("=")
        if kind == "!":
            return {"*": rest}
        if kind == "if":
            return {True: {ours: value == "True" or _plain(value)}, False: {}}
        if kind == "bool":
            return {said: {rest: said} if rest else {} for said in (True, False)}
        if kind.startswith("#"):
            found: Mapping[Any, Any] = tables()["words"][kind[1:]]
            return found
        pairs = (word.partition("=") for word in rest.split() if kind.endswith(":"))
        return {
            _plain(theirs or ours): {kind[:-1]: _plain(ours)} if ours else {} for ours, _, theirs in pairs
        }

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The fields of a Plan that it is about."""
        if self.words:
            said = [one for one in self.words.values() if isinstance(one, Mapping)]
            return tuple(dict.fromkeys(field for one in said for field in one))
        first, *rest = self.says.split() or ["int"]
        return () if first == "int" else (first, *(word.partition("=")[0] for word in rest if "=" in word))

    def write(self, names: Mapping[str, Any]) -> Any:
        """Return the value for a plan of which these names are known; None leaves the key out."""
        if not self.written:
            return None
        said = names.get(self.fields[0]) if self.fields else None
        if self.words and self.fields:
            said = next((word for word, one in self.words.items() if one == {self.fields[0]: said}), None)
        return said if self.written == "*" else eval(self._code, {**KNOWN}, {**names, "it": said})

    def read(self, value: Any) -> Fields:
        """Return the fields of a Plan that a value says.

        Raises:
            ValueError: the key cannot have it.
        """
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
    """A framework's configuration: its table in formats.toml, and what the framework needs beside its rows.

    Attributes:
        name: what `Plan.to` calls it.
        syntax: how its values are written.
        finish: completes the fields that keys said alone by what several keys say together; it may add notes.
        names: what expressions of its rows know of the plan, beside its fields.
    """

    name: str
    syntax: Syntax
    finish: Callable[[Values, Fields, list[str]], Fields]
    names: Callable[[ExportRequest], Mapping[str, Any]] = lambda asked: {}

    @property
    def title(self) -> str:
        """What its users call it, and which file it is."""
        return str(tables()[self.name]["title"])

    @cached_property
    def keys(self) -> Mapping[str, FormatKey]:
        """The keys that carry a plan, by name, in the order of the file."""
        return {row[0]: FormatKey(*row) for row in rows_of(self.name)}

    @cached_property
    def common(self) -> frozenset[str]:
        """Keys that other programs have too: by them alone no file is recognized."""
        found: set[str] = set()
        for word in tables()[self.name].get("common", []):
            found |= {row[0] for row in rows_of(word)} if word in tables() else {word}
        return frozenset(found)

    def check(self, asked: ExportRequest) -> None:
        """Check that the framework would not refuse the plan.

        Raises:
            ValueError: it would; the message shows a plan that it would not.
        """
        plan = asked.plan
        known = {"p": plan, "asked": asked, "call": call_of(plan)}
        for when, says in tables()[self.name].get("refused", ()):
            if eval(when, {**known}):
                parts = parts_of(says, known)
                raise ValueError(
                    "".join(one if isinstance(one, str) else call_of(plan, one) for one in parts)
                )

    def values_of(self, asked: ExportRequest) -> Values:
        """Return what is written, by key."""
        plan = asked.plan
        known = {
            **vars(plan),
            **vars(asked),
            "mesh": plan.mesh,
            "ranks": plan.ranks,
            **self.names(asked),
        }
        for name, expression in tables()[self.name].get("names", {}).items():
            known[name] = eval(expression, {**KNOWN}, known)
        found = ((name, key.write(known)) for name, key in self.keys.items())
        return {name: value for name, value in found if value is not None}

    def fields_of(self, values: Mapping[str, Any], notes: list[str], ranks: int | None = None) -> Fields:
        """Return the fields of a Plan that values say, and add notes about what a Plan says differently.

        `ranks`: how many there are, if the caller says so.

        Raises:
            ValueError: a value is none that the key can have.
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
        """Say why a field's value cannot be said."""
        table = tables()[self.name]
        if field in table.get("cannot", {}) or "otherwise" in table:
            return str(table.get("cannot", {}).get(field) or table["otherwise"])
        key = next((key for key in self.keys.values() if field in key.fields), None)
        if key is None:
            return f"{self.name} has no key for it"
        return (
            f"{key.name} is one of {', '.join(map(str, key.words))}"
            if key.words
            else f"{key.name} does not go with this plan"
        )


def rows_of(name: str) -> Iterator[list[str]]:
    """Yield a table's rows, and in place of another table's name its rows, which "-unwritten" reads only."""
    table, _, unwritten = name.partition("-")
    for row in tables()[table]["rows"]:
        for key, written, says, comment in [row] if isinstance(row, list) else rows_of(row):
            yield [key, "" if unwritten else written, says, comment]
