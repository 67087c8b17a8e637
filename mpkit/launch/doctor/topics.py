"""The common issues of a guide to training on several GPUs, each with the steps that lead to its cause."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files

__all__ = ["TOPICS", "Topic", "find_topic"]


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


def _topics() -> dict[str, Topic]:
    rows = tomllib.loads((files(__package__) / "topics.toml").read_text(encoding="utf-8"))
    return {
        name: Topic(name, tuple(row["words"]), row["means"], tuple(map(tuple, row["steps"])))
        for name, row in rows.items()
    }


TOPICS: Mapping[str, Topic] = _topics()
"""The topics by name."""


def find_topic(name: object) -> Topic:
    """Return the topic that a user means.

    >>> find_topic("OOM").name, find_topic("slow scalling").name
    ('out of memory', 'slow scaling')

    Raises:
        ValueError: there is none.
    """
    if not isinstance(name, str):
        raise ValueError(
            f"doctor({name!r}): a topic is one of {_list_topics()}, or leave it out for the whole report"
        )
    wanted = name.lower().strip().replace("_", " ")
    by_word = {word: topic for topic in TOPICS.values() for word in (topic.name, *topic.words)}
    near = wanted if wanted in by_word else next(iter(get_close_matches(wanted, by_word, 1, 0.75)), None)
    if near is None:
        raise ValueError(f"doctor({name!r}): there is no such topic; there are {_list_topics()}")
    return by_word[near]


def _list_topics() -> str:
    return ", ".join(repr(topic.name) for topic in TOPICS.values())
