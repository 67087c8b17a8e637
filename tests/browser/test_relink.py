"""A recorded run on another link, replayed in a page: every time is the number that Python's replay has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

import mpkit as mk
from mpkit.devices.link import Link
from mpkit.timeline.replay.link_program import link_program
from mpkit.views.page.html import html
from mpkit.views.page.relink import MACHINES
from tests.test_site import played

PLANS = {
    "gpipe": mk.Plan.gpipe(4, 8),
    "zero3": mk.Plan.zero(3, 4),
    "mixed": mk.Plan(pp=2, dp=2, tp=2, schedule="zb_h1", microbatches=4, zero=1),
}
SHOWN = """([latency, bandwidth]) => {
  for (const [name, value] of [['latency', latency], ['bandwidth', bandwidth]]) {
    const control = document.querySelector(`#relink-${name}`);
    control.value = value;
    control.dispatchEvent(new Event('input', { bubbles: true }));
  }
  const { times, bubble, time } = document.querySelector('#relink').relink.played;
  return { start: [...times.start], end: [...times.end], issued: [...times.issued], bubble, time };
}"""


def rows(spans: np.ndarray) -> list[tuple[Any, ...]]:
    """What each span is and when, in an order that its times decide."""
    names = (
        "rank",
        "kind",
        "lane",
        "depth",
        "stage",
        "microbatch",
        "group",
        "name",
        "start",
        "end",
        "issued",
    )
    return sorted(zip(*(spans[name].tolist() for name in names), strict=True))


@pytest.mark.parametrize("name", PLANS)
def test_the_page_replays_to_the_digit(
    new_page: Callable[..., Page], tmp_path: Path, name: str, screenshot: Callable[[Page, str], None]
) -> None:
    trace, machine = played(PLANS[name]), mk.hardware("8x-a100-nvlink")
    program = link_program(trace, machine)
    path = tmp_path / "page.html"
    path.write_text(html(mk.Timeline.of(trace, machine), relink=program), encoding="utf-8")
    page = new_page()
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn=true]")
    for latency, bandwidth in ((3.0, 264.0), (0.0, 1000.0), (35.5, 1.25), (250.0, 0.07)):
        shown = page.evaluate(SHOWN, [latency, bandwidth])
        other = replace(machine, link=Link("another", latency * 1e-6, bandwidth * 1e9))
        truth = mk.Timeline.of(trace, other)
        spans = program.replayed.spans.copy()
        for column in ("start", "end", "issued"):
            spans[column] = shown[column]
        assert rows(spans) == rows(truth.spans), (latency, bandwidth)
        assert shown["time"] == truth.step_time
        assert shown["bubble"] == pytest.approx(truth.bubble, abs=1e-12)
    for at, chosen in enumerate(MACHINES, 1):  # with what their collectives reach, and their ramps
        page.locator("#relink-link").select_option(index=at)
        time = page.evaluate("document.querySelector('#relink').relink.played.time")
        assert time == mk.Timeline.of(trace, replace(machine, link=mk.hardware(chosen).link)).step_time
    assert [
        each for each in Axe().run(page).response["violations"] if each["impact"] in ("serious", "critical")
    ] == []

    # The address holds what is set, for others.
    page.evaluate(SHOWN, [35.5, 1.25])
    before = page.locator("#relink .mpkit-note").inner_text()
    screenshot(page, f"relink-{name}")
    page.reload()
    page.wait_for_selector("html[data-drawn=true]")
    expect(page.locator("#relink .mpkit-note")).to_have_text(before)
    page.locator("#relink-bandwidth").fill("0")
    expect(page.get_by_role("alert").last).to_contain_text("more than 0 GB/s")
