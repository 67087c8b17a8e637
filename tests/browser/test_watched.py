"""A watched program in JupyterLab: its timeline grows while the cell runs."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Page, expect

from tests.browser.lab import TOUCH, WATCHED, look_at, open_notebook, run

Screenshot = Callable[[Page, str], None]


def test_a_watched_program_is_drawn_while_its_cell_runs(
    jupyterlab: str, lab_page: Page, screenshot: Screenshot
) -> None:
    page = lab_page
    open_notebook(page, f"{jupyterlab}/workspaces/watched/tree/watched.ipynb")
    cells = [page.locator(".jp-CodeCell").nth(i) for i in range(len(WATCHED))]
    run(page, cells[0])
    look_at(cells[1])
    cells[1].locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    # ---- while it runs: some of the 100 steps, what ranks print, and no button that the kernel would not hear
    expect(cells[1]).to_contain_text("running")
    page.wait_for_function(
        "(cell) => /step [1-9]/.test(cell.innerText) && cell.innerText.includes('[rank 1] begun: 0')",
        arg=cells[1].element_handle(),
    )
    assert cells[1].locator(".jp-InputPrompt").first.text_content() == "[*]:"
    expect(cells[1].locator("button", has_text="Stop")).to_be_hidden()
    screenshot(page, "watched-running")
    page.evaluate(TOUCH, "seen")
    # ---- at its end: all steps, and what the program returned
    expect(cells[1]).to_contain_text("finished")
    expect(cells[1]).to_contain_text("step 100")
    expect(cells[1]).to_contain_text("[2, 2]")
    screenshot(page, "watched")
    # ---- a program that fails
    run(page, cells[2])
    expect(cells[2]).to_contain_text("failed")
    expect(cells[2]).to_contain_text("ZeroDivisionError")
