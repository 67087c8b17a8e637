"""What a notebook shows beside its answers: tries and predictions in its outputs, the questions it asks, and what the
student wrote. None of it gives points for an exercise.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeGuard

from mpkit.common.size_limits import read_json
from mpkit.course.framework.variants import Variant
from mpkit.course.grading.reading import NoNotebook, all_cells, calls_in, checks_in, dicts, text_of
from mpkit.course.judge import CHECKED
from mpkit.course.notebooks import ASKED, JUSTIFICATION, METADATA
from mpkit.course.predictions.predict import PREDICTED
from mpkit.course.predictions.questions import QUESTIONS

__all__ = [
    "predictions_kept",
    "predictions_shown",
    "questions_in",
    "read_justifications",
    "tries_shown",
    "variant_of",
]

LONGEST_TEXT = 20_000
"""The most characters of a justification that are kept."""


def tries_shown(data: bytes) -> dict[str, int]:
    """Return how often each exercise was checked, as the outputs of the notebook's checks say; none if it is broken."""
    found: dict[str, int] = {}
    for said in _outputs(data, CHECKED):
        if isinstance(said.get("name"), str) and type(said.get("tries")) is int:
            found[said["name"]] = max(found.get(said["name"], 0), said["tries"])
    return found


def variant_of(data: bytes) -> str:
    """Return whose numbers a notebook has, as its metadata says; "" if they say nothing that was handed out."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        said = read_json(data.decode("utf-8-sig"))["metadata"][METADATA]["variant"]
        return str(Variant.read(said))
    return ""


def read_justifications(data: bytes) -> list[tuple[str, str]]:
    """Return the justifications in a notebook: (exercise, text) of each cell that is marked as one.

    A cell is marked by the tag "justification"; which exercise it is about, the tag "for:NAME" says, or else the last
    check above it. Empty ones, and those that are as they were handed out, are left out.
    """
    found, last = [], ""
    for cell in _cells(data):
        text = text_of(cell)
        metadata = cell.get("metadata")
        tags = metadata.get("tags") if isinstance(metadata, dict) else None
        tags = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
        if cell.get("cell_type") == "code":
            last = next((name for name, _ in checks_in(text)), last)
        if JUSTIFICATION in tags and text.strip() and text.strip() != ASKED:
            about = next((tag.removeprefix("for:") for tag in tags if tag.startswith("for:")), last)
            found.append((about, text.replace(ASKED, "").strip()[:LONGEST_TEXT]))
    return found


def _cells(data: bytes) -> list[dict[str, Any]]:
    try:
        return all_cells(data)
    except NoNotebook:
        return []


def questions_in(sources: list[str]) -> tuple[str, ...]:
    """Return the names of the questions that a notebook's cells ask with `mk.predict`."""
    known = {each.name for each in QUESTIONS}
    names = [
        call.args[0].value
        for source in sources
        for call in calls_in(source, "predict")
        if isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    ]
    return tuple(dict.fromkeys(name for name in names if name in known))


def predictions_shown(data: bytes) -> dict[str, float]:
    """Return the predictions that the notebook's outputs show as locked in, the first of each."""
    found: dict[str, float] = {}
    for said in _outputs(data, PREDICTED):
        if isinstance(said.get("name"), str) and _is_number(said.get("value")):
            found.setdefault(said["name"], float(said["value"]))
    return found


def predictions_kept(progress: Any) -> dict[str, float]:
    """Return the predictions in a file of progress, as it is read; none if it is anything else."""
    kept = progress.get("predictions") if isinstance(progress, dict) else None
    if not isinstance(kept, Mapping):
        return {}
    values = {name: one.get("value") for name, one in kept.items() if isinstance(one, dict)}
    return {str(name): float(value) for name, value in values.items() if _is_number(value)}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _outputs(data: bytes, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the parts of one type in the outputs of a notebook."""
    for cell in _cells(data):
        for output in dicts(cell.get("outputs")):
            bundle = output.get("data")
            said = bundle.get(kind) if isinstance(bundle, dict) else None
            if isinstance(said, dict):
                yield said
