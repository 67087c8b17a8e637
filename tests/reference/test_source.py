"""`mk.source`."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import nbformat
import pytest

import mpkit as mk
from mpkit.strategies.reference.reading import SOURCES

FOLDER = Path(mk.__file__).parent / "strategies" / "reference"
SHARED = {"__init__", "arguments", "reading", "serial", "stage"}
"""Modules that are no strategy."""


def test_every_reference_has_a_name_and_is_short() -> None:
    modules = {path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.py")}
    assert modules - {"__init__", "arguments", "reading", "tensor/__init__", "experts/__init__"} == set(
        SOURCES.values()
    )
    for name, module in SOURCES.items():
        text = mk.source(name)
        assert text == mk.source(module.rpartition("/")[2]) == (FOLDER / f"{module}.py").read_text()
        assert text.count("\n") <= (60 if module not in SHARED else 100), module
        doc = import_module(f"mpkit.strategies.reference.{module.replace('/', '.')}").__doc__
        assert doc is not None and ("\nSource: " in doc or "\nSources: " in doc), module


def test_phases_in_the_code_are_those_of_the_docstring_in_its_order() -> None:
    for name in SOURCES:
        text = mk.source(name)
        doc = str(ast.get_docstring(ast.parse(text)))
        comments = [line.partition("# ---- ")[2] for line in text.splitlines() if "# ---- " in line]
        phases = [comment.partition(", with")[0] for comment in comments]
        places = [doc.find(f"\n    {phase}") for phase in phases]
        assert -1 not in places and places == sorted(places), (name, phases)


def test_a_notebook_highlights_it_and_python_prints_it() -> None:
    text = mk.source("ZeRO_2")
    assert repr(text) == text and text._repr_markdown_() == f"```python\n{text}```"


def test_notebooks_show_what_is_there() -> None:
    shown = 0
    for path in (FOLDER.parents[2] / "notebooks").glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            if found := re.fullmatch(r'mk\.source\("(.+)"\)', cell.source):
                (output,) = cell.outputs
                assert output.data["text/markdown"] == mk.source(found[1])._repr_markdown_(), (
                    path.name,
                    found[1],
                )
                shown += 1
    assert shown >= 15


def test_nothing_of_the_kit_but_the_context() -> None:
    allowed = {"mpkit", "mpkit.errors"}
    for module in SOURCES.values():
        tree = ast.parse((FOLDER / f"{module}.py").read_text())
        names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        kit = {
            name
            for name in names
            if name.startswith("mpkit") and not name.startswith("mpkit.strategies.reference")
        }
        assert kit <= allowed, module


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(
        ValueError, match=r"Is mk.source\('zero-3'\) meant\? There are: serial, naive, gpipe, 1f1b"
    ):
        mk.source("zero-4")
