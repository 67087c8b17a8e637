"""The site in Chromium, opened from files: every page, wide and on a phone, light and dark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from mpkit.common.display import draw
from scripts.site import GALLERY, write
from tests.pages.test_site import stand_in

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
