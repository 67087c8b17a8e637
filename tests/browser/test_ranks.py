"""`%%ranks` as a learner meets it: in JupyterLab, with the stop button."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Page, expect

from tests.browser.lab import RANKS, look_at, open_notebook, run

Screenshot = Callable[[Page, str], None]


def test_cells_on_ranks(jupyterlab: str, lab_page: Page, screenshot: Screenshot) -> None:
    page = lab_page
    open_notebook(page, f"{jupyterlab}/workspaces/ranks/tree/ranks.ipynb")
    cells = [page.locator(".jp-CodeCell").nth(i) for i in range(len(RANKS))]
    # ---- output and values, by rank
    run(page, cells[0])
    run(page, cells[1])
    for rank in range(4):
        expect(cells[1]).to_contain_text(f"[rank {rank}] rank {rank} of 4")
        expect(cells[1]).to_contain_text(f"[rank {rank}] tensor([{6 * rank}., {6 * rank}.])")
    # ---- an error of one rank, with its line
    run(page, cells[2])
    expect(cells[2]).to_contain_text(
        "rank 2 of 4: AttributeError: 'Tensor' object has no attribute 'nothing'"
    )
    expect(cells[2]).to_contain_text('File "Cell In[3]", line 3')
    expect(cells[2]).to_contain_text("[rank 3] 3")
    expect(cells[2]).not_to_contain_text("interactiveshell")
    screenshot(page, "ranks-error")
    # ---- the stop button
    look_at(cells[3])
    cells[3].locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    expect(cells[3].locator(".jp-OutputArea")).to_contain_text("[rank 3] asleep")
    page.evaluate("window.jupyterapp.commands.execute('notebook:interrupt-kernel')")
    expect(cells[3].locator(".jp-OutputArea")).to_contain_text("KeyboardInterrupt")
    # ---- the variables are still there, on the ranks that are asked
    run(page, cells[4])
    expect(cells[4]).to_contain_text("[ranks 0,2] tensor(12.)")
    run(page, cells[5])
    screenshot(page, "ranks")
    run(page, cells[6])
    expect(cells[6]).to_contain_text("[ranks 0-3] 4")
