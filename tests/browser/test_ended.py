"""A run in JupyterLab that goes on: nothing below it moves, and when its kernel ends its picture stays and says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.lab import look_at, open_notebook, run

Screenshot = Callable[[Page, str], None]

RESTART = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"

BROKEN = """(output) => [...output.querySelectorAll('.jupyter-widgets-disconnected')].filter((each) =>
  !['none', 'normal'].includes(getComputedStyle(each, '::before').content)).length"""
"""How many parts show the icon of a broken widget."""

LANES = """(root) => {
  const top = (each) => each.getBoundingClientRect().top;
  return [...root.querySelectorAll('.mpkit-stage')].map((each) => top(each) - top(root.closest('.jp-OutputArea')));
}"""
"""How far below the top of the output the lanes and the memory are."""


def test_what_a_kernel_drew_last_stays_when_it_ends(
    jupyterlab: str, lab_page: Page, screenshot: Screenshot
) -> None:
    page = lab_page
    open_notebook(page, f"{jupyterlab}/workspaces/ended/tree/ended.ipynb")
    cell = page.locator(".jp-CodeCell").first
    run(page, cell)
    timeline = cell.locator(".mpkit-timeline")
    page.wait_for_function("(root) => root.panel.chart.placed", arg=timeline.element_handle())
    before = timeline.evaluate(LANES)
    expect(cell).to_contain_text("step 3 of 9")
    page.wait_for_function("(root) => Number(root.dataset.spans) > 0", arg=timeline.element_handle())
    look_at(timeline)
    screenshot(page, "ended-before")
    # ---- while it runs, nothing above the lanes grows: losses and charts came, and the lanes are where they were
    assert timeline.evaluate(LANES) == pytest.approx(before, abs=2) and len(before) == 2
    expect(timeline.locator(".mpkit-ended")).to_be_hidden()
    expect(cell.get_by_role("button", name="Stop")).to_be_visible()
    spans = timeline.get_attribute("data-spans")
    page.evaluate(RESTART)
    # ---- the picture stays, says once that it is still, and nothing seems to go on
    expect(timeline.locator(".mpkit-ended")).to_have_text(
        "The kernel of this picture has ended or was restarted. This is the last that it sent."
    )
    assert timeline.get_attribute("data-spans") == spans
    expect(cell.locator(".mpkit-stop")).to_be_hidden()
    expect(timeline.get_by_role("button", name="Follow")).to_be_hidden()
    assert cell.locator(".jp-OutputArea").first.evaluate(BROKEN) == 0
    assert timeline.evaluate("(root) => root.panel.chart.store.count") > 0
    screenshot(page, "ended-after")
