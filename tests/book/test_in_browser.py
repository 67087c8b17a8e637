"""The book as its readers use it: searched, in dark, its timelines zoomed, on a phone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Frame, Page, expect

from scripts.book.timelines import SHOWN, Shown

NewPage = Callable[..., Page]
TIMES = "document.querySelector('.mpkit-timeline').panel.chart.times"


def timeline_of(page: Page, number: int = 0) -> Frame:
    """Scroll to a page's timeline; return its frame once it is drawn."""
    holder = page.locator("iframe.timeline").nth(number)
    holder.scroll_into_view_if_needed()
    element = holder.element_handle()
    # Asked of the page: the frame itself is replaced when its content arrives.
    drawn = "(element) => element.contentDocument?.documentElement?.dataset.drawn === 'true'"
    page.wait_for_function(drawn, arg=element)
    frame = element.content_frame()
    assert frame is not None
    return frame


def test_search_finds_the_bubble(new_page: NewPage, site: str) -> None:
    page = new_page()
    page.goto(f"{site}/index.html")
    page.keyboard.press("Control+k")
    page.keyboard.type("bubble")
    page.keyboard.press("Enter")
    found = page.locator("#search-results")
    expect(found.get_by_role("link", name="Pipeline bubbles", exact=True)).to_be_visible()
    found.get_by_role("link", name="Glossary > bubble").click()
    page.wait_for_url(lambda url: url.startswith(f"{site}/docs/glossary.html") and url.endswith("#bubble"))


@pytest.mark.parametrize("system", ["light", "dark"])
def test_the_reader_chooses_light_or_dark_for_timelines_too(
    new_page: NewPage, site: str, system: str
) -> None:
    page = new_page(color_scheme=system)
    page.goto(f"{site}/index.html")
    frame = timeline_of(page)
    chart = frame.locator(".mpkit-timeline")
    ground = "getComputedStyle(document.body).backgroundColor"
    expect(chart).to_have_attribute("data-theme", system)
    before = page.evaluate(ground), frame.evaluate(ground)
    other = {"light": "dark", "dark": "light"}[system]
    page.locator(".theme-switch-button:visible").click()
    page.locator(f".theme-change-button[data-mode={other}]:visible").click()
    expect(page.locator("html")).to_have_attribute("data-theme", other)
    expect(chart).to_have_attribute("data-theme", other)
    after = page.evaluate(ground), frame.evaluate(ground)
    assert before[0] != after[0] and before[1] != after[1]


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: shown.strategy)
def test_tutorials_have_timelines_that_zoom(new_page: NewPage, site: str, shown: Shown) -> None:
    page = new_page()
    page.goto(f"{site}/notebooks/{shown.notebook}.html")
    number = [each.strategy for each in SHOWN if each.notebook == shown.notebook].index(shown.strategy)
    frame = timeline_of(page, number)
    assert frame.url == f"{site}/timelines/{shown.strategy}.html"
    begin, end = frame.evaluate(TIMES)
    frame.locator(".mpkit-stage").hover()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -240)
    frame.wait_for_function(f"{TIMES}[1] - {TIMES}[0] < {0.95 * (end - begin)}")
    # As high as its content: nothing in the frame has to be scrolled.
    frame.wait_for_function("document.documentElement.scrollHeight <= innerHeight + 1")


def test_schedules_can_be_tried_with_sliders(new_page: NewPage, site: str) -> None:
    page = new_page()
    page.goto(f"{site}/timelines.html")
    trial = timeline_of(page).locator("#try")
    before = trial.inner_text()
    trial.get_by_role("slider").first.press("ArrowRight")
    expect(trial).not_to_have_text(before, use_inner_text=True)


PAGES = [
    "index.html",
    "tutorials.html",
    "timelines.html",
    "api.html",
    "search.html?q=bubble",
    "notebooks/01-pipeline-bubbles.html",
    "notebooks/11-your-gpu-trace.html",
    "notebooks/exercises/4-pipelines.html",
    "docs/glossary.html",
    "api/mpkit.Plan.html",
    "api/mpkit.tensor.html",
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_axe_finds_nothing_serious_and_nothing_sticks_out(
    new_page: NewPage, site: str, scheme: str, width: int
) -> None:
    page = new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    for name in PAGES:
        page.goto(f"{site}/{name}")
        if "search" in name:
            expect(page.locator("#search-results li").first).to_be_visible()
        # preload: axe would load style sheets anew, from addresses that are wrong.
        found = Axe().run(page, options={"preload": False}).response["violations"]
        serious = [(name, each["id"], [node["target"] for node in each["nodes"]]) for each in found
                   if each["impact"] in ("serious", "critical")]  # fmt: skip
        assert serious == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
