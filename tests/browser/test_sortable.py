"""The sortable table in a real browser: by pointer and by keys, missing values last, and said to screen readers."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from mpkit.views.browser import sortable

STATE = {
    "caption": "Plans",
    "columns": [
        {"name": "plan", "title": "the plan", "number": False},
        {"name": "step", "title": "seconds per step", "number": True},
    ],
    "rows": [
        [["ddp", "ddp"], ["90 ms", 0.09]],
        [["zero3", "zero3"], ["1.2 s", 1.2]],
        [["1f1b", "1f1b"], ["", None]],
    ],
}


def has_column(page: Page, number: int, texts: list[str]) -> None:
    expect(page.locator(f"tbody td:nth-child({number + 1})")).to_have_text(texts)


@pytest.fixture
def table(new_page: Callable[..., Page]) -> Page:
    page, (script, style) = new_page(), sortable()
    page.set_content('<html lang="en"><title>table</title><body><main></main></body></html>')
    page.add_style_tag(content=style)
    entry = """
    const state = %s;
    const model = { get: (name) => state[name], on() {} };
    view.render({ model, el: document.querySelector("main") });"""
    source = script.replace("export default", "const view =") + entry % json.dumps(STATE)
    page.add_script_tag(content=source, type="module")
    page.wait_for_selector("tbody td")
    return page


def test_a_head_sorts_up_and_then_down(table: Page) -> None:
    has_column(table, 0, ["ddp", "zero3", "1f1b"])
    table.get_by_role("button", name="plan").click()
    has_column(table, 0, ["1f1b", "ddp", "zero3"])
    table.get_by_role("button", name="plan").click()
    has_column(table, 0, ["zero3", "ddp", "1f1b"])
    expect(table.locator("th").first).to_have_attribute("aria-sort", "descending")


def test_numbers_are_sorted_by_value_from_the_keyboard(table: Page) -> None:
    table.get_by_role("button", name="step").focus()
    table.keyboard.press("Enter")
    has_column(table, 1, ["90 ms", "1.2 s", ""])
    table.keyboard.press("Enter")
    has_column(table, 1, ["1.2 s", "90 ms", ""])
