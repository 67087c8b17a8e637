"""What `mk.doctor()` returns, and what it is made of: findings, the common issues of a guide, nccl's variables.

topics.toml has the issues with their steps. variables.csv has the variables; a row without a meaning is one that nccl
documents and the table does not explain. Sources: NCCL user guide, "Environment Variables"; PyTorch documentation,
"ProcessGroupNCCL Environment Variables" and "Distributed communication package".
"""

import csv
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from mpkit.common.display import draw

LEVELS = ("costs", "note", "not checked", "fine")
"""How a finding matters, in the report's order: only those that cost make `mpkit doctor` exit with 1."""


@dataclass(frozen=True)
class CheckupFinding:
    """One finding.

    Attributes:
        subject: what it is about, such as "GPUs" or "links".
        level: whether it costs something: one of `LEVELS`.
        what: the finding, a sentence.
        evidence: where it was seen: who was asked, and what the answer was.
        costs: what it costs; "" where nothing.
        fix: the command that fixes it, or what else would; "" where there is nothing to fix.
        topics: the guide's common issues that it belongs to, by name.
    """

    subject: str
    level: str
    what: str
    evidence: str
    costs: str = ""
    fix: str = ""
    topics: tuple[str, ...] = ()


@dataclass(frozen=True)
class Topic:
    """A common issue, by the name that users say."""

    name: str
    words: list[str]  # other words for it
    means: str  # what it means, and what would be good
    steps: list[list[str]]  # what to look at, in order: [what, the command]


@dataclass(frozen=True)
class Variable:
    """A variable of nccl or its surroundings."""

    name: str
    values: str  # what it takes, with | between; "#" is a number, "*" anything
    default: str
    meaning: str
    when: str  # when to set it
    costs_if: str  # the value that costs something
    costs: str  # what that costs

    def takes(self, value: str) -> bool:
        """Return whether a value is one of those it takes, in any case of letters."""
        if self.values == "*":
            return bool(value.strip())
        if self.values == "#":
            return value.strip().lstrip("-").isdecimal()
        return value.strip().upper() in self.values.upper().split("|")


def _text_of(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


@cache
def topics() -> Mapping[str, Topic]:
    """Return the topics by name."""
    return {name: Topic(name, **row) for name, row in tomllib.loads(_text_of("topics.toml")).items()}


@cache
def variables() -> Mapping[str, Variable]:
    """Return the table of variables by their names."""
    rows = csv.DictReader(_text_of("variables.csv").splitlines())
    return {row["name"]: Variable(**row) for row in rows}


@cache
def words_of_findings() -> Mapping[str, dict[str, Any]]:
    """Return the words of all findings, by the names that rules yield."""
    return tomllib.loads(_text_of("findings.toml"))


def find_topic(name: object) -> Topic:
    """Return the topic that a user means.

    >>> find_topic("OOM").name, find_topic("slow scalling").name
    ('out of memory', 'slow scaling')
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


def plural(number: int, word: str) -> str:
    """Return a number with its word: "1 GPU", "2 GPUs"."""
    return f"{number} {word}{'s' * (number != 1)}"


@dataclass(frozen=True)
class CheckupReport:
    """What the doctor found. It prints as text.

    Attributes:
        findings: in the order of the machine: GPUs, links, host, variables, measurements.
        topic: the common issue that was asked for; None: everything.
        seconds: how long it took.
    """

    findings: tuple[CheckupFinding, ...]
    topic: Topic | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing was found that costs."""
        return not self.of("costs")

    @property
    def variables(self) -> list[Variable]:
        """The variables that the table explains, where these were asked for."""
        asked = self.topic is not None and self.topic.name == "variables"
        return [each for each in variables().values() if each.meaning] if asked else []

    def of(self, level: str) -> list[CheckupFinding]:
        """Return the findings of one level: "costs", "note", "fine" or "not checked".

        Raises:
            ValueError: there is no such level.
        """
        if level not in LEVELS:
            raise ValueError(f"of({level!r}): the levels are {', '.join(map(repr, LEVELS))}")
        return [finding for finding in self.findings if finding.level == level]

    def to_json(self) -> str:
        """Return the report as JSON: {"ok", "findings": [...]}, and of a topic "topic" and "steps"."""
        held: dict[str, Any] = {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}
        if self.topic is not None:
            held |= {"topic": self.topic.name, "means": self.topic.means, "steps": self.topic.steps}
        if self.variables:
            held["variables"] = [asdict(variable) for variable in self.variables]
        return json.dumps(held, indent=2)

    def __str__(self) -> str:
        return str(draw(self, "text"))

    __repr__ = __str__
