"""A prediction, typed into its box in JupyterLab, in a browser."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.lab import in_cell, look_at, open_notebook, run


@pytest.mark.timeout(200)
def test_a_prediction_is_locked_in(
    jupyterlab: str, lab_page: Page, screenshot: Callable[[Page, str], None]
) -> None:
    page = lab_page
    open_notebook(page, f"{jupyterlab}/workspaces/predict/tree/predict.ipynb")
    ask, compare = in_cell(page, "guess = mk.predict"), in_cell(page, "guess.against()")
    output = run(page, ask)
    expect(output).to_contain_text("GPipe with 4 stages and 8 micro-batches")
    expect(run(page, compare)).to_contain_text("Predict it first")
    field, button = output.locator("input"), output.locator("button")
    look_at(output)
    field.fill("27")
    field.press("Tab")
    button.click()
    expect(output).to_contain_text("27 percent are '27 %' or 0.27")
    screenshot(page, "prediction-mistyped")
    field.fill("20 %")
    field.press("Tab")
    button.click()
    expect(output).to_contain_text("Locked in: 20.0 %.")
    expect(field).to_be_disabled()
    expect(button).to_be_disabled()
    expect(run(page, compare)).to_contain_text("7.3 percentage points too low")
    screenshot(page, "prediction-compared")
    expect(run(page, ask)).to_contain_text("Locked in: 20.0 %.")
