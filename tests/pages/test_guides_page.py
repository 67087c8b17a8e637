"""docs/guides.md: the headings that it quotes are there, its plans can be made, and its calls exist."""

from __future__ import annotations

import re
from operator import attrgetter

import pytest

import mpkit as mk
from mpkit.cli import main
from mpkit.launch.doctor.report import topics
from tests.pages.test_links import ROOT, prose

PAGE = ROOT / "docs" / "guides.md"
TEXT = PAGE.read_text(encoding="utf-8")
CODE = sorted(set(re.findall(r"`([^`]+)`", TEXT)))


def test_quoted_headings_are_there() -> None:
    quotes = re.findall(r"\]\(([^)#]+\.ipynb)\), \"([^\"]+)\"", TEXT)
    assert len(quotes) > 25
    for path, words in quotes:
        heads = re.findall(r"^#+ (.+)$", prose(PAGE.parent / path), flags=re.MULTILINE)
        assert any(words in head for head in heads), f"{path}: {words}"


def test_plans_can_be_made() -> None:
    plans = [code for code in CODE if re.match(r"(mk\.)?Plan[.(]", code) and ".read" not in code]
    plans = [code.removesuffix(".placement()") for code in plans]
    assert len(plans) > 15
    for code in plans:
        assert isinstance(eval(code, {"mk": mk, "Plan": mk.Plan}), mk.Plan), code


def test_calls_exist() -> None:
    for name in re.findall(r"`mk\.([\w.]*\w)", TEXT):
        attrgetter(name)(mk)
    for name in re.findall(r"mk\.source\(\"([^\"]+)\"\)", TEXT):
        mk.source(name)


ROWS = [
    line.strip("| \n").split(" | ", 1)
    for line in TEXT.splitlines()
    if line.startswith("| ") and line != "| topic | here |"
]


def test_every_row_leads_somewhere() -> None:
    """184 topics: each has a link (which tests/pages/test_links.py follows), a call, a command or a file."""
    assert len(ROWS) >= 184 and len({topic for topic, _ in ROWS}) == len(ROWS)
    assert [topic for topic, here in ROWS if not re.search(r"\]\(|`", here)] == []
    runs = [topic for topic, here in ROWS if "(text)" not in here]
    assert len(runs) >= 180


def test_whole_calls_work() -> None:
    """What can be evaluated as it stands: predictions, placements, schedules and sources."""
    kinds = "Plan|simulate|fits|hardware|source"
    whole = [code for code in CODE if re.fullmatch(rf"mk\.({kinds})\b.*\)", code) and "..." not in code]
    assert len(whole) > 30
    for code in whole:
        eval(code, {"mk": mk})


def test_commands_and_files_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    named = capsys.readouterr().out.split()
    for words in re.findall(r"`mpkit (\w+)", TEXT):
        assert words in named, words
    for topic in re.findall(r"`mpkit doctor ([a-z0-9 -]+)`", TEXT):
        assert topic in {*topics(), "variables"}, topic
    for path in re.findall(r"`((?:examples|environment|pyproject)[\w./]*)`", TEXT):
        assert (ROOT / path).exists(), path
