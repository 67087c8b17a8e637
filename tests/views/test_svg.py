"""A timeline as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

import mpkit as mk
from mpkit.views.timeline.svg import svg

SVG = "{http://www.w3.org/2000/svg}"


def parse(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def test_every_operation_is_a_box_in_its_ranks_row() -> None:
    root = parse(svg(mk.simulate(mk.Plan.gpipe(4, 8)), title="GPipe"))
    rows = root.findall(f"{SVG}g")
    assert [row.get("aria-label") for row in rows] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
    for row in rows:
        kinds = [(box.get("class") or "").split()[0] for box in row.findall(f"{SVG}rect")]
        assert kinds.count("k1") == kinds.count("k2") == 8
        numbers = [text.text for text in row.findall(f"{SVG}text")][1:]
        assert sorted(numbers) == sorted(2 * "01234567")


def test_who_cannot_see_it_is_told() -> None:
    root = parse(svg(mk.simulate(mk.Plan.gpipe(4, 8)), title="GPipe"))
    assert root.get("role") == "img"
    assert root.findtext(f"{SVG}title") == "GPipe"
    assert "bubble: 27.3 %" in root.findtext(f"{SVG}desc")
    assert "GPU 3: idle 27.3 %" in root.findtext(f"{SVG}desc")


def test_a_hundred_thousand_operations_fit_a_bounded_file(long_run) -> None:
    small, large = svg(long_run(20_000)), svg(long_run(100_000))
    parse(large)
    assert len(large) < 600_000
    assert len(large) < 2 * len(small)


def test_the_bubble_stays_seen_when_boxes_are_thinner_than_pixels(long_run) -> None:
    root = parse(svg(long_run(100_000)))
    boxes = root.find(f"{SVG}g").findall(f"{SVG}rect")
    assert boxes[0].get("class") == "k0"  # the hatch lies below ...
    assert any(box.get("opacity") for box in boxes)  # ... and shows through what is partly idle


def test_strings_stay_strings(hostile: mk.Timeline) -> None:
    drawn = svg(hostile, title="</svg><script>alert(2)</script>")
    assert "<script" not in drawn
    root = parse(drawn)
    assert "<script>alert" in root.findtext(f"{SVG}title")
    assert not root.findall(f".//{SVG}script")
