"""The site in Chromium, opened from files: every page, wide and on a phone, light and dark."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

import mpkit as mk
from mpkit.common.display import draw
from mpkit.plan.schedule import NAMES
from mpkit.views.browser import css
from mpkit.views.page.html import html
from mpkit.views.page.trial import simulated
from scripts.site import GALLERY, write
from tests.pages.test_pages import stand_in

NewPage = Callable[..., Page]
Screenshot = Callable[[Page, str], None]


@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (400, "dark")])
def test_pages_open_from_files_and_axe_finds_nothing_serious(
    new_page: NewPage, tmp_path: Path, screenshot: Screenshot, width: int, scheme: str
) -> None:
    write(tmp_path, {"gpipe": ("GPipe", stand_in(2))})
    page = new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
    for name in ("index", "gallery", "runs/gpipe", "explorer"):
        page.goto((tmp_path / f"{name}.html").as_uri())
        if page.locator(".host").count():
            page.wait_for_selector("html[data-drawn=true]")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        found: list[dict[str, Any]] = Axe().run(page).response["violations"]
        assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == [], name
        screenshot(page, f"site-{name.replace('/', '-')}-{width}-{scheme}")
    page.get_by_label("schedule", exact=True).select_option("ZB-H1")
    page.wait_for_url("**schedule=zb_h1**")


OUTSIDE = """() => {
  const { left, right, bottom } = document.querySelector("svg").getBoundingClientRect();
  return [...document.querySelectorAll("svg text")].map((each) => [each.textContent, each.getBoundingClientRect()])
    .filter(([, box]) => box.width && (box.left < left - 1 || box.right > right + 1 || box.bottom > bottom + 1))
    .map(([words]) => words);
}"""


def test_words_stay_inside_their_pictures_at_every_width(new_page: NewPage) -> None:
    page = new_page()
    for shown in GALLERY:
        result = shown.result()
        for width in (400, 560, 960):
            page.set_content(draw(result, "svg", width))
            assert page.evaluate(OUTSIDE) == [], (shown.name, width)
        page.set_content(f"<div style='width:400px'>{result._repr_mimebundle_()['text/html']}</div>")
        page.wait_for_function("[...document.images].every((each) => each.complete)")
        assert page.evaluate("[...document.images].map((each) => each.width)") == [0, 400], shown.name


# ---- The section "Try it" of a page: what its script computes equals what mk.simulate does.

PANEL = "document.querySelector('#try .mpkit-timeline').panel"


def open_trial(page: Page, folder: Path, p: int = 4, m: int = 8) -> None:
    path = folder / "page.html"
    shown = mk.simulate(mk.Plan.gpipe(4, 8), hop=0.1)
    path.write_text(html({"GPipe": shown}, title="A page", try_it=(p, m)), encoding="utf-8")
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn=true]")


def set_slider(page: Page, name: str, value: float) -> None:
    page.locator(f"#try-{name}").fill(str(value))


def test_every_schedule_on_the_page_is_the_simulated_one(new_page: NewPage, tmp_path: Path) -> None:
    """All names, at the corners of the sliders and between: the script alone, fast, to twelve digits."""
    page = new_page()
    open_trial(page, tmp_path)
    cases = [
        (name, p, m, f, i, w, hop)
        for name in NAMES
        for p, m in ((2, 1), (2, 16), (4, 8), (5, 3), (8, 16), (8, 1))
        for f, i, w, hop in ((1, 1, 1, 0), (0.7, 1.3, 0.45, 0.25), (1, 0, 2, 0.05))
    ]
    set_all = """(cases) => cases.map(([schedule, ranks, microbatches, forward, input_grad, weight_grad, hop]) => {
      const values = { schedule, ranks, microbatches, forward, input_grad, weight_grad, hop };
      for (const [name, value] of Object.entries(values)) document.querySelector('#try-' + name).value = value;
      document.querySelector('#try-hop').dispatchEvent(new Event('input', { bubbles: true }));
      const { bubble, step_time } = document.querySelector('#try .mpkit-timeline').panel.state;
      return [bubble, step_time];
    })"""
    shown = page.evaluate(set_all, cases)
    for (name, p, m, f, i, w, hop), (bubble, length) in zip(cases, shown, strict=True):
        truth = simulated(
            name, {"ranks": p, "microbatches": m, "forward": f, "input_grad": i, "weight_grad": w, "hop": hop}
        )
        assert bubble == pytest.approx(truth.bubble, abs=1e-12), (name, p, m, f, i, w, hop)
        assert length == pytest.approx(truth.step_time, rel=1e-12), (name, p, m, f, i, w, hop)


def test_a_reader_moves_the_sliders(new_page: NewPage, tmp_path: Path) -> None:
    page = new_page()
    open_trial(page, tmp_path)
    bubble = page.locator("#try .mpkit-figure").first.locator("b")
    expect(bubble).to_have_text("27.3 %")  # 1F1B's: 3/11
    expect(page.locator("#try-backward")).to_be_visible()
    expect(page.locator("#try-input_grad")).to_be_hidden()
    set_slider(page, "microbatches", 16)
    expect(bubble).to_have_text(f"{100 * 3 / 19:.1f} %")
    set_slider(page, "backward", 3)
    set_slider(page, "hop", 0.25)
    at = {"microbatches": 16, "input_grad": 1.5, "weight_grad": 1.5, "hop": 0.25}
    truth = simulated("1f1b", at)
    expect(bubble).to_have_text(f"{100 * truth.bubble:.1f} %")
    page.get_by_label("schedule", exact=True).select_option("ZB-H1")
    truth = simulated("zb_h1", at)
    expect(bubble).to_have_text(f"{100 * truth.bubble:.1f} %")
    expect(page.locator("#try .words")).to_contain_text("Backwards are split")
    expect(page.locator("#try-backward")).to_be_hidden()
    slider = page.get_by_role("slider", name="weight gradients W")
    slider.press("ArrowRight")
    expect(slider).to_have_attribute("aria-valuetext", "1.55 seconds")
    truth = simulated("zb_h1", at | {"weight_grad": 1.55})
    expect(bubble).to_have_text(f"{100 * truth.bubble:.1f} %")
    set_slider(page, "ranks", 8)
    page.wait_for_function(f"{PANEL}.chart.labels.length === 8")
    rows = page.locator("#try table tbody tr")
    page.locator("#try").get_by_text("The figures as a table").click()
    expect(rows).to_have_count(8)
    truth = simulated("zb_h1", at | {"weight_grad": 1.55, "ranks": 8})
    first = rows.first.locator("td").all_text_contents()
    assert first[0] == f"{100 * truth.idle[0] / truth.step_time:.1f} %"
    assert first[4] == str(truth.peak_memory[0]["total"])


# ---- The same in a notebook, for two schedules: mk.explore.

OPEN = """async (state) => {
  const { default: explorer } = await import(URL.createObjectURL(new Blob([state._esm], { type: 'text/javascript' })));
  const el = document.body.appendChild(document.createElement('div'));
  await explorer().render({ model: { get: (name) => state[name] }, el });
}"""


STATES = "[...document.querySelectorAll('.mpkit-timeline')].map(({ panel }) => panel.state)"


def show(page: Page, shown: Any) -> None:
    """Show a widget of mk.explore below what is there."""
    state = {name: getattr(shown, name) for name in ("_esm", "sections", "data", "look")}
    page.evaluate(OPEN, state)


@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (400, "dark")])
def test_sliders_of_the_explorer_move_both_sides_on_one_axis(
    new_page: NewPage, screenshot: Screenshot, width: int, scheme: str
) -> None:
    page, shown = (
        new_page(color_scheme=scheme, viewport={"width": width, "height": 900}),
        mk.explore("gpipe", "zb_h1"),
    )
    head = "<html lang=en><title>-</title><meta name=color-scheme content='light dark'>"
    page.set_content(f"<!doctype html>{head}<body style='background:Canvas'>")
    page.add_style_tag(content=css())
    show(page, shown)
    assert [state["step_time"] for state in page.evaluate(STATES)] == [33.0, 27.0]
    page.locator("[name=microbatches] >> nth=1").fill("16")
    expect(page.locator("[name=microbatches] >> nth=0")).to_have_value("16")
    found = page.evaluate(STATES)
    assert [state["step_time"] for state in found] == [57.0, 51.0] and {state["room"] for state in found} == {
        57.0
    }
    # A schedule of one's own begins with what was there, and says what is wrong with it.
    page.locator("[name=schedule] >> nth=0").select_option("own")
    expect(page.locator("[name=own] >> nth=0")).to_have_value(re.compile("^F0 F1 "))
    page.locator("[name=own] >> nth=0").fill("F0 B0\nB0 F0")
    expect(page.locator(".mpkit-wrong").first).to_contain_text("wait for each other")
    violations = Axe().run(page).response["violations"]
    assert [each["id"] for each in violations if each["impact"] in ("serious", "critical")] == []
    screenshot(page, f"explorer-{width}-{scheme}")


@pytest.mark.parametrize("setting", [
    {"forward": 0.012, "input_grad": 0.01, "weight_grad": 0.0123},  # between the sliders' steps
    {"input_grad": 10, "weight_grad": 10},  # beyond their ends
    {"input_grad": 1.05, "hop": 0.333},  # a whole backward is longer by half of its slider's step
])  # fmt: skip
def test_the_explorer_plays_and_shows_the_times_that_it_was_given(
    new_page: NewPage, setting: dict[str, float]
) -> None:
    page, shown = new_page(), mk.explore("gpipe", **setting)
    show(page, shown)
    (state,) = page.evaluate(STATES)
    assert state["step_time"] == pytest.approx(simulated("gpipe", setting).step_time)
    backward = page.locator("[name=backward]").input_value()
    assert float(backward) == pytest.approx(setting["input_grad"] + setting.get("weight_grad", 1))


def test_rows_of_the_explorer_can_be_one_and_none_and_labels_find_their_own_controls(
    new_page: NewPage,
) -> None:
    page = new_page()
    for _ in range(2):
        show(page, mk.explore("F0 B0"))
    assert [state["step_time"] for state in page.evaluate(STATES)] == [3.0, 3.0]
    page.get_by_text("schedule", exact=True).nth(1).click()
    expect(page.locator("[name=schedule]").nth(1)).to_be_focused()
    page.locator("[name=own]").first.fill("")
    expect(page.locator(".mpkit-wrong").first).to_contain_text("There are 0 lines: write one for each rank")
    expect(page.locator("[name=own]").first).to_have_value("")


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_can_be_where_a_reader_begins_to_write(new_page: NewPage, name: str) -> None:
    page = new_page()
    show(page, mk.explore(name))
    before = page.evaluate(STATES)[0]["step_time"]
    page.locator("[name=schedule]").select_option("own")
    expect(page.locator(".mpkit-wrong")).to_have_text("")
    assert page.evaluate(STATES)[0]["step_time"] == before
