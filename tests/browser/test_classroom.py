"""Exercises as a student does them, in JupyterLab, in a browser."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from mpkit.course.catalogue import ExerciseEntry, find
from mpkit.course.framework.source import IMPORTS
from tests.browser.lab import in_cell, look_at, open_notebook, run, write

Screenshot = Callable[[Page, str], None]


def open_exercise(page: Page, jupyterlab: str, notebook: str, entry: ExerciseEntry) -> None:
    """Its notebook, with all run that comes before the answer."""
    open_notebook(page, f"{jupyterlab}/workspaces/{notebook}/tree/exercises/{notebook}.ipynb")
    for code in filter(None, (IMPORTS, entry.given_code.strip())):
        run(page, in_cell(page, code.splitlines()[0]))


def first_line(entry: ExerciseEntry) -> str:
    """Of the student's cell, by which it is found."""
    return next(line for line in entry.source.stub.splitlines() if line.strip())


@pytest.mark.timeout(300)
def test_an_exercise_failed_twice_and_solved(jupyterlab: str, lab_page: Page, screenshot: Screenshot) -> None:
    page, entry = lab_page, find("pass-the-token")
    open_exercise(page, jupyterlab, "1-ranks", entry)
    answer, check = in_cell(page, first_line(entry)), in_cell(page, f'mk.check("{entry.name}"')
    run(page, answer)
    expect(run(page, check)).to_contain_text("First say who your neighbours are")
    screenshot(page, "exercise-stub")

    mistakes = {one.name: one for one in entry.exercise.mistakes}
    # The stub is no answer, and the same wrong answer again is no further one.
    first = "nobody-closes-the-ring"
    for number, name, hint in ((1, first, 0), (2, first, 0), (3, "adds-after-it-sent", 1)):
        write(page, answer, mistakes[name].wrong)
        run(page, answer)
        output = run(page, check)
        expect(output).to_contain_text("not yet")
        expect(output).to_contain_text(mistakes[name].hints[hint].split("`")[0])
        screenshot(page, f"exercise-failed-{number}")

    write(page, answer, entry.source.plain)
    run(page, answer)
    output = run(page, check)
    expect(output).to_contain_text("solved, at the third try")
    expect(output.locator("img")).to_have_count(2)
    look_at(output)
    screenshot(page, "exercise-solved")
    expect(run(page, in_cell(page, "mk.progress()"))).to_contain_text("✔ pass-the-token")
    screenshot(page, "exercise-progress")
