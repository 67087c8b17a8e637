"""Key and Format: their keys beside our fields. What is written, what is read and what cannot be said follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.syntax import Syntax
from mpkit.plan.formats.word import Word, shorten
from mpkit.plan.kinds import whole

__all__ = [
    "LARGEST", "RANKS", "Format", "FormatKey", "bool_of", "choice", "context", "flag", "number", "number_of",
    "older_key", "refuse_file",
]  # fmt: skip

LARGEST = 2**40
"""The largest number that is read: elements of a bucket, or tokens of a batch, are no more."""
RANKS = "ranks"
"""Among the values of a file: the ranks that the caller of `Plan.read` says, since the file may not."""

Values = dict[str, Any]
Fields = dict[str, Any]


@dataclass(frozen=True)
class FormatKey:
    """A key of a format.

    Attributes:
        name: its name; a nested one is joined by dots.
        comment: what it means, in our words.
        write: the value for a plan; None leaves the key out.
        read: the fields of a Plan that a value says; ValueError if it is none.
        fields: the fields that it is about.
        values: the values that it can have, if they are few.
    """

    name: str
    comment: str
    write: Callable[[ExportRequest], Any]
    read: Callable[[Any], Mapping[str, Any]]
    fields: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Format:
    """A framework's configuration.

    Attributes:
        name: what `Plan.to` calls it.
        title: what its users call it, and which file it is.
        syntax: how its values are written.
        keys: the keys that carry a plan, in the order of the file.
        finish: completes the fields that keys said alone by what several keys say together; it may add notes.
        reasons: why a field cannot be said, where that is more than that there is no key.
        check: raises ValueError if the framework would refuse the plan.
        differ: what the framework does differently with what it is told of the plan, in words; "" if nothing is known.
        common: keys that other programs have too: by them alone no file is recognized.
    """

    name: str
    title: str
    syntax: Syntax
    keys: tuple[FormatKey, ...]
    finish: Callable[[Values, Fields, list[str]], Fields] = lambda values, fields, notes: fields
    reasons: Mapping[str, str] | None = None
    check: Callable[[ExportRequest], None] = lambda asked: None
    common: frozenset[str] = frozenset()
    differ: Callable[[ExportRequest], str] = lambda asked: ""

    def values_of(self, asked: ExportRequest) -> Values:
        """Return what is written, by key."""
        found = ((key.name, key.write(asked)) for key in self.keys)
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
            reason = value.reason if isinstance(value, Word) else ""
            try:
                said = known[name].read(value)
            except ValueError as error:
                raise ValueError(f"{self.name}: {name} = {shorten(value)}: {reason or error}") from None
            before = fields.get("precision")
            if said.get("precision", before) != before and before in ("bf16", "fp16"):
                within = f" ({value.note})" if isinstance(value, Word) and value.note else ""
                raise ValueError(
                    f"{self.name}: bf16 and fp16 are both enabled{within}; the framework takes one of them"
                )
            fields |= said
            if isinstance(value, Word) and value.note:
                notes.append(value.note)
        fields = self.finish(kept, fields, notes)
        if fields.get("sequence_parallel") and fields.get("tp", 1) == 1:
            del fields["sequence_parallel"]
            notes.append("sequence parallelism changes nothing without tensor parallelism: left out")
        return fields

    def why_not(self, field: str, value: Any) -> str:
        """Say why a field's value cannot be said."""
        if self.reasons and field in self.reasons:
            return self.reasons[field]
        for key in self.keys:
            if field in key.fields and key.values:
                return f"{key.name} is one of {', '.join(map(str, key.values))}"
        near = next((key.name for key in self.keys if field in key.fields), None)
        return f"{near} does not go with this plan" if near else f"{self.name} has no key for it"


# ---- values


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


# ---- keys of a common kind


def number(
    name: str, field: str, comment: str, when: Callable[[ExportRequest], bool] = lambda asked: True
) -> FormatKey:
    """Return a key that is a degree of the plan."""
    return FormatKey(
        name, comment, lambda asked: getattr(asked.plan, field) if when(asked) else None,
        lambda value: {field: number_of(value)}, (field,),
    )  # fmt: skip


def choice(
    name: str,
    field: str,
    values: Mapping[Any, Any],
    comment: str,
    *,
    otherwise: Any = None,
    when: Callable[[ExportRequest], bool] = lambda asked: True,
) -> FormatKey:
    """Return a key whose values stand for values of a field.

    Args:
        name, field, comment: of the key.
        values: theirs by ours.
        otherwise: what is written for a value of ours that has none.
        when: whether it is written.
    """
    ours = {str(theirs).lower(): mine for mine, theirs in reversed([*values.items()])}

    def read(value: Any) -> Mapping[str, Any]:
        word = "no" if value is False and "no" in ours else str(value).lower()  # YAML's no without quotes
        if word not in ours:
            raise ValueError(f"one of {', '.join(map(str, values.values()))}")
        return {field: ours[word]}

    def write(asked: ExportRequest) -> Any:
        value = getattr(asked.plan, field)
        return values.get(value, otherwise) if when(asked) else None

    return FormatKey(name, comment, write, read, (field,), tuple(dict.fromkeys(values.values())))


def flag(name: str, field: str, ours: Any, comment: str, *, always: bool = False) -> FormatKey:
    """Return a key that is true where a field has this value; it is left out otherwise, if not `always`."""

    def write(asked: ExportRequest) -> bool | None:
        said = getattr(asked.plan, field) == ours
        return said if said or always else None

    return FormatKey(name, comment, write, lambda value: {field: ours} if bool_of(value) else {}, (field,))


def refuse_file(value: Any) -> Mapping[str, Any]:
    """Refuse the name of another file as a key's value.

    Raises:
        ValueError: always; it says how to read that file.
    """
    raise ValueError(
        "the plan is in that file: Plan.read('ds_config.json'), with a train_batch_size that says how many replicas"
    )


def older_key(name: str, fields: Sequence[str], read: Callable[[Any], Mapping[str, Any]]) -> FormatKey:
    """Return a key of older versions, which is read and never written."""
    return FormatKey(name, "as older versions say it", lambda asked: None, read, tuple(fields))


def context(
    name: str, comment: str, write: Callable[[ExportRequest], Any], kinds: Sequence[type] = ()
) -> FormatKey:
    """Return a key that says what a Plan leaves open, and is read for what it says together with others."""

    def read(value: Any) -> Mapping[str, Any]:
        if int in kinds:
            number_of(value)
        if bool in kinds:
            bool_of(value)
        return {}

    return FormatKey(name, comment, write, read)
