"""FormatKey and Format: rows of formats.toml. What is written, what is read and what cannot be said follows from
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType
from typing import Any

from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.syntax import Page, Syntax, Word, shorten
from mpkit.plan.kinds import whole

__all__ = ["LARGEST", "RANKS", "Format", "FormatCode", "FormatKey", "bool_of", "number_of", "refuse_file"]

LARGEST = 2**40
"""The largest number that is read: elements of a bucket, or tokens of a batch, are no more."""
RANKS = "ranks"
"""Among the values of a file: the ranks that the caller of `Plan.read` says, since the file may not."""
KNOWN: Mapping[str, Any] = {"__builtins__": {}, "max": max, "round": round}
"""What the expressions of formats.toml can call."""

Values = dict[str, Any]
Fields = dict[str, Any]
Reader = Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True)
class FormatCode:
    """What a format needs beside its rows.

    Attributes:
        finish: completes the fields that keys said alone by what several keys say together; it may add notes.
        check: raises ValueError if the framework would refuse the plan.
        differ: what the framework does differently with what it is told of the plan, in words; "" if nothing is known.
        names: what expressions of its rows know of the plan, beside its fields.
        readers: the functions that rows name with "@".
        body: the text of a page, without its head, in a script or a module.
    """

    finish: Callable[[Values, Fields, list[str]], Fields] = lambda values, fields, notes: fields
    check: Callable[[ExportRequest], None] = lambda asked: None
    differ: Callable[[ExportRequest], str] = lambda asked: ""
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
        words = self.says.replace(":", "").split()
        if not words or self.says in ("int", "bool"):
            return ()
        if words[0].startswith("@"):
            return tuple(words[1:])
        if words[0] in ("if", "bool"):
            return (words[1].partition("=")[0],)
        constants = [] if ":" in self.says else [word.partition("=")[0] for word in words[1:] if "=" in word]
        return (words[0], *constants)

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
        return (
            next((theirs for theirs, one in self.choices.items() if one == ours), None)
            if self.choices
            else ours
        )

    def read(self, value: Any) -> Mapping[str, Any]:
        """Return the fields of a Plan that a value says.

        Raises:
            ValueError: the key cannot have it.
        """
        if self.reader is not None:
            return self.reader(value)
        kind, _, rest = self.says.partition(" ")
        if not kind:
            return {}
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
        if str(value) in [word[1:] for word in words if word.startswith("!")]:
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
        sections = {name[:at]: name for name in known for at, letter in enumerate(name) if letter == "."}
        fields: Fields = {}
        kept: Values = {} if ranks is None else {RANKS: ranks}
        for name, value in sorted(values.items(), key=lambda item: order.get(item[0], -1)):
            if name not in known and name in sections and value is not None and value != {}:
                raise ValueError(
                    f"{self.name}: {name} = {shorten(value)}: it holds settings, such as {sections[name]}"
                )
            if name not in known or value is None:
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
            reason = value.reason if isinstance(value, Word) else ""
            raise ValueError(f"{self.name}: {key.name} = {shorten(value)}: {reason or error}") from None
        before = fields.get("precision")
        if said.get("precision", before) != before and before in ("bf16", "fp16"):
            within = f" ({value.note})" if isinstance(value, Word) and value.note else ""
            raise ValueError(
                f"{self.name}: bf16 and fp16 are both enabled{within}; the framework takes one of them"
            )
        fields |= said
        if isinstance(value, Word) and value.note:
            notes.append(value.note)

    def why_not(self, field: str) -> str:
        """Say why a field's value cannot be said."""
        if field in self.reasons:
            return self.reasons[field]
        if self.otherwise:
            return self.otherwise
        for key in self.keys:
            if field in key.fields and key.choices:
                return f"{key.name} is one of {', '.join(map(str, key.choices))}"
        near = next((key.name for key in self.keys if field in key.fields), None)
        return f"{near} does not go with this plan" if near else f"{self.name} has no key for it"


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
            "a whole number, 1 or more, such as 4" + " (up to 2**40)" * (found is not None and found > 1)
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


def refuse_file(value: Any) -> Mapping[str, Any]:
    """Refuse the name of another file as a key's value.

    Raises:
        ValueError: always; it says how to read that file.
    """
    raise ValueError(
        "the plan is in that file: Plan.read('ds_config.json'), with a train_batch_size that says how many replicas"
    )
