"""docs/guides.md: the headings that it quotes are there, its plans can be made, and its calls exist."""

from __future__ import annotations

import re
from operator import attrgetter

import mpkit as mk
from tests.test_links import ROOT, prose

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
    assert len(plans) > 15
    for code in plans:
        assert isinstance(eval(code, {"mk": mk, "Plan": mk.Plan}), mk.Plan), code


def test_calls_exist() -> None:
    for name in re.findall(r"`mk\.([\w.]*\w)", TEXT):
        attrgetter(name)(mk)
    for name in re.findall(r"mk\.source\(\"([^\"]+)\"\)", TEXT):
        mk.source(name)
