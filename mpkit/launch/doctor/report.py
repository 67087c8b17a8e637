"""What `mk.doctor()` returns: findings with evidence, what they cost and what fixes them; for a topic its steps."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from mpkit.common.display import draw

if TYPE_CHECKING:
    from mpkit.launch.doctor.variables import Variable

__all__ = ["CheckupFinding", "CheckupReport", "Level", "Topic", "find_topic", "plural", "topics"]


class Level(StrEnum):
    """How a finding matters: only those that cost make `mpkit doctor` exit with 1."""

    COSTS = "costs"
    NOTE = "note"
    FINE = "fine"
    UNCHECKED = "not checked"


@dataclass(frozen=True)
class CheckupFinding:
    """One finding.

    Attributes:
        subject: what it is about, such as "GPUs" or "links".
        level: whether it costs something.
        what: the finding, a sentence.
        evidence: where it was seen: who was asked, and what the answer was.
        costs: what it costs; "" where nothing.
        fix: the command that fixes it, or what else would; "" where there is nothing to fix.
        topics: the guide's common issues that it belongs to, by name.
    """

    subject: str
    level: Level
    what: str
    evidence: str
    costs: str = ""
    fix: str = ""
    topics: tuple[str, ...] = ()


def plural(number: int, word: str) -> str:
    """Return a number with its word.

    >>> plural(1, "GPU"), plural(2, "GPU")
    ('1 GPU', '2 GPUs')
    """
    return f"{number} {word}{'s' * (number != 1)}"


@dataclass(frozen=True)
class Topic:
    """A common issue.

    Attributes:
        name: what users say.
        words: other words for it.
        means: what it means, and what would be good.
        steps: what to look at, in order: (what, the command).
    """

    name: str
    words: tuple[str, ...]
    means: str
    steps: tuple[tuple[str, str], ...]


@cache
def topics() -> Mapping[str, Topic]:
    """Return the topics by name, which are in topics.toml."""
    rows = tomllib.loads((files(__package__) / "topics.toml").read_text(encoding="utf-8"))
    return {
        name: Topic(name, tuple(row["words"]), row["means"], tuple(map(tuple, row["steps"])))
        for name, row in rows.items()
    }


def find_topic(name: object) -> Topic:
    """Return the topic that a user means.

    >>> find_topic("OOM").name, find_topic("slow scalling").name
    ('out of memory', 'slow scaling')

    Raises:
        ValueError: there is none.
    """
    there = ", ".join(map(repr, topics()))
    if not isinstance(name, str):
        raise ValueError(f"doctor({name!r}): a topic is one of {there}, or leave it out for the whole report")
    wanted = name.lower().strip().replace("_", " ")
    by_word = {word: topic for topic in topics().values() for word in (topic.name, *topic.words)}
    near = wanted if wanted in by_word else next(iter(get_close_matches(wanted, by_word, 1, 0.75)), None)
    if near is None:
        raise ValueError(f"doctor({name!r}): there is no such topic; there are {there}")
    return by_word[near]


@dataclass(frozen=True)
class CheckupReport:
    """What the doctor found. It prints as text.

    Attributes:
        findings: in the order of the machine: GPUs, links, host, variables, measurements.
        topic: the common issue that was asked for; None: everything.
        variables: the table of variables, where it was asked for.
        composed: where the evidence is from if not from this machine.
        seconds: how long it took.
    """

    findings: tuple[CheckupFinding, ...]
    topic: Topic | None = None
    variables: tuple[Variable, ...] = ()
    composed: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing was found that costs."""
        return not self.of(Level.COSTS)

    def of(self, level: Level | str) -> list[CheckupFinding]:
        """Return the findings of one level: "costs", "note", "fine" or "not checked".

        Raises:
            ValueError: there is no such level.
        """
        try:
            wanted = Level(level)
        except ValueError:
            raise ValueError(
                f"of({level!r}): the levels are {', '.join(repr(str(each)) for each in Level)}"
            ) from None
        return [finding for finding in self.findings if finding.level is wanted]

    def to_json(self) -> str:
        """Return the report as JSON: {"ok", "findings": [...]}, and of a topic "topic" and "steps"."""
        held: dict[str, Any] = {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}
        if self.topic is not None:
            steps = [list(step) for step in self.topic.steps]
            held |= {"topic": self.topic.name, "means": self.topic.means, "steps": steps}
        if self.variables:
            held["variables"] = [asdict(variable) for variable in self.variables]
        if self.composed:
            held["composed"] = self.composed
        return json.dumps(held, indent=2)

    def __str__(self) -> str:
        return str(draw(self, "text"))

    __repr__ = __str__
