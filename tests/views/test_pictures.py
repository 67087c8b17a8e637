"""The timeline's pictures: rows and boxes, SVG, text, lanes, colours, Perfetto."""

import json
from collections import defaultdict
from collections.abc import Callable
from itertools import combinations, product
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpkit as mk
from mpkit.plan.mesh import Mesh
from mpkit.timeline import metrics
from mpkit.timeline.replay.spans import HELD, SPAN
from mpkit.trace import Kind
from mpkit.views.drawing.colours import CATEGORY_INKS, CAUSE_INKS, DEVICE_INKS, INKS, Key, contrast, outline
from mpkit.views.drawing.lanes import groups_of, rank_label, short_label
from mpkit.views.theme import THEMES
from mpkit.views.timeline.perfetto import perfetto
from mpkit.views.timeline.picture import picture, subtract_spans
from mpkit.views.timeline.svg import svg
from mpkit.views.timeline.text import text

# ---- Timeline -> Picture.


def test_a_lane_a_gpu_with_the_idle_time_as_boxes() -> None:
    pic = picture(mk.simulate(mk.Plan.gpipe(4, 8)))
    assert [row.label for row in pic.rows] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
    for rank in range(4):
        mine = pic.of_row(rank)
        assert (mine["key"] == Key.FORWARD).sum() == (mine["key"] == Key.BACKWARD).sum() == 8
        idle = mine[mine["key"] == Key.IDLE]
        assert (idle["end"] - idle["start"]).sum() == pytest.approx(9.0)
        assert pic.idle_share(rank) == pytest.approx(3 / 11)
        # Together they fill the step without overlap.
        assert np.allclose(mine["start"][1:], mine["end"][:-1])
    assert pic.figures["bubble"] == "27.3 %"


def test_thin_rows_appear_where_there_is_something_in_them(data_parallel: mk.Timeline) -> None:
    pic = picture(data_parallel)
    assert [(row.rank, row.part) for row in pic.rows] == [
        (rank, part) for rank in range(2) for part in ("compute", "layers", "comm", "host")
    ]
    assert pic.rows[0].label == "rank 0 (CPU)"
    assert {box["key"] for box in pic.of_row(1)} == {Key.FORWARD}
    # A layer within an action is not counted again: 6.5 of 8 seconds are busy.
    assert pic.idle_share(0) == pytest.approx(1.5 / 8)


def test_the_hover_text_of_idle_time_says_what_was_waited_for(data_parallel: mk.Timeline) -> None:
    pic = picture(data_parallel)
    idle = [box for box in pic.of_row(0) if box["key"] == Key.IDLE]
    text = pic.hover(idle[0])
    assert text.startswith("idle for 1.00 s")
    assert "waited for rank 0 (CPU): all reduce" in text


@given(
    bounds=st.lists(st.integers(0, 60), min_size=4, max_size=14, unique=True),
    action=st.tuples(st.integers(0, 59), st.integers(1, 20)),
)
def test_pieces_are_what_is_outside_of_the_waits(bounds: list[int], action: tuple[int, int]) -> None:
    ordered = sorted(bounds)[: len(bounds) // 2 * 2]
    spans = np.zeros(1 + len(ordered) // 2, SPAN)
    spans["kind"], spans["depth"] = Kind.WAIT, 1
    spans["start"][1:], spans["end"][1:] = ordered[::2], ordered[1::2]
    spans["kind"][0], spans["depth"][0] = Kind.FORWARD, 0
    spans["start"][0], spans["end"][0] = action[0], action[0] + action[1]
    spans["cause"] = -1
    pic = picture(mk.Timeline(spans, [""], np.zeros(0, HELD), 1, "virtual"))
    drawn = pic.boxes[pic.boxes["key"] == Key.FORWARD]
    want = subtract_spans(metrics.covered_times(spans[1:]), np.array([[action[0], sum(action)]], float))
    found = np.stack([drawn["start"], drawn["end"]], axis=1) + pic.origin
    assert found.tolist() == want.tolist()
    assert drawn["named"].sum() == (len(want) > 0)
    longest = drawn[drawn["named"]]
    assert all(longest["end"] - longest["start"] == max(drawn["end"] - drawn["start"], default=0))


# ---- A timeline as SVG.

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


# ---- A timeline as plain text.

STAIRCASE = """\
GPU 0 │0░1░2░3░4░5░6░7░··················7▓▓▓6▓▓▓5▓▓▓4▓▓▓3▓▓▓2▓▓▓1▓▓▓0▓▓▓│ idle 27.3 %
GPU 1 │··0░1░2░3░4░5░6░7░············7▓▓▓6▓▓▓5▓▓▓4▓▓▓3▓▓▓2▓▓▓1▓▓▓0▓▓▓····│ idle 27.3 %
GPU 2 │····0░1░2░3░4░5░6░7░······7▓▓▓6▓▓▓5▓▓▓4▓▓▓3▓▓▓2▓▓▓1▓▓▓0▓▓▓········│ idle 27.3 %
GPU 3 │······0░1░2░3░4░5░6░7░7▓▓▓6▓▓▓5▓▓▓4▓▓▓3▓▓▓2▓▓▓1▓▓▓0▓▓▓············│ idle 27.3 %
       0                                                           33.0 s
░ forward  ▓ backward  · idle
bubble 27.3 % · step time 33.0 s · simulated: from the schedule alone, nothing was run"""


def test_gpipes_staircase() -> None:
    assert text(mk.simulate(mk.Plan.gpipe(4, 8)), 100) == STAIRCASE


@pytest.mark.parametrize("width", [40, 61, 80, 200])
def test_no_line_of_the_picture_is_wider_than_asked(gpipe: mk.Timeline, width: int) -> None:
    lines = text(gpipe, width).splitlines()
    assert max(map(len, lines[:5])) <= width


def test_what_communicates_has_a_line_when_nothing_else_is_there(data_parallel: mk.Timeline) -> None:
    assert "comm" not in text(data_parallel, 100).split("\n")[1]
    alone = mk.Timeline(
        data_parallel.spans[data_parallel.spans["lane"] == 1], [""], data_parallel.held, 2, "virtual", {}
    )
    assert "━" in text(alone, 100)


# ---- Ranks of a mesh: what they are called, and how their lanes are grouped in every picture.

Meshed = Callable[..., mk.Timeline]


@pytest.mark.parametrize(("mesh", "label", "groups"), [
    (Mesh(pp=2, dp=2, tp=2), "rank 1  pp0 dp0 tp1", ["pp0 dp0", "pp0 dp1", "pp1 dp0", "pp1 dp1"]),
    (Mesh(pp=2, dp=2), "rank 1  pp0 dp1", ["pp0", "pp1"]),
    (Mesh(dp=2, tp=2), "rank 1  dp0 tp1", ["dp0", "dp1"]),
    (Mesh(pp=2, cp=2, tp=2), "rank 1  pp0 cp0 tp1", ["pp0", "pp1"]),
    (Mesh(cp=2, tp=2), "rank 1  cp0 tp1", ["cp0", "cp1"]),
    (Mesh(tp=4), "rank 1 (CPU)", []),
])  # fmt: skip
def test_names_and_groups(meshed: Meshed, mesh: Mesh, label: str, groups: list[str]) -> None:
    timeline = meshed(mesh)
    assert rank_label(timeline, 1) == label
    assert short_label(timeline, 1) == label.split("  ")[0]
    assert [group.place for group in groups_of(timeline)] == groups


def test_lanes_are_below_their_groups_header_and_fold(meshed: Meshed) -> None:
    timeline = meshed(Mesh(pp=2, dp=1, tp=2))
    rows = [(row.part, row.label) for row in picture(timeline).rows if row.part in ("group", "compute")]
    assert rows == [
        ("group", "pp0 · ranks 0, 1"), ("compute", "rank 0  pp0 tp0"), ("compute", "rank 1  pp0 tp1"),
        ("group", "pp1 · ranks 2, 3"), ("compute", "rank 2  pp1 tp0"), ("compute", "rank 3  pp1 tp1"),
    ]  # fmt: skip
    whole, folded = picture(timeline), picture(timeline, fold=True)
    assert [row.rank for row in folded.rows if row.part == "compute"] == [0, 2]
    assert folded.rows[0].label == "pp0 · the first of ranks 0, 1"
    # What is left of it is drawn as it was, on the same axis, and the figures are of all ranks.
    assert (folded.duration, folded.figures) == (whole.duration, whole.figures)
    assert folded.idle_share(2) == whole.idle_share(2)
    assert {timeline.spans["rank"][box["span"]] for box in folded.boxes if box["span"] >= 0} == {0, 2}


# ---- The palette: contrast of text and marks, and colours that deuteranopes tell apart.

DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
"""Linear RGB as a deuteranope sees it (Machado, Oliveira and Fernandes 2009, severity 1)."""


def rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)], float)


def seen(colour: str) -> np.ndarray:
    """A colour's red, green and blue, 0 to 255, as a deuteranope sees them."""
    parts = rgb(colour) / 255
    linear = DEUTERANOPIA @ np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    linear = linear.clip(0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def apart(one: str, other: str) -> float:
    """The distance of two colours for a deuteranope, of 441 at most."""
    return float(np.linalg.norm(seen(one) - seen(other)))


def operations(theme: str) -> dict[Key, str]:
    return {key: getattr(INKS[key], theme) for key in Key if key != Key.IDLE}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_deuteranopes_tell_operations_apart(theme: str) -> None:
    inks = operations(theme)
    assert apart(inks[Key.OPTIMIZER], inks[Key.COMM]) > 110
    assert contrast(inks[Key.OPTIMIZER], inks[Key.COMM]) > 1.8
    nearest = min(combinations(inks, 2), key=lambda pair: apart(inks[pair[0]], inks[pair[1]]))
    assert apart(inks[nearest[0]], inks[nearest[1]]) > 40, nearest


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_marks_have_3_to_1_and_their_text_4_5(theme: str) -> None:
    ground = THEMES[theme].ground
    inks = [*CATEGORY_INKS.values(), *DEVICE_INKS.values()]
    for fill in [*operations(theme).values(), *(ink[theme == "dark"] for ink in inks)]:
        assert contrast(outline(fill, theme) or fill, ground) >= 3, fill
    for key in operations(theme):
        ink = INKS[key]
        assert contrast(getattr(ink, theme), getattr(ink, f"on_{theme}")) >= 4.5, ink.word
    assert contrast(THEMES[theme].text, ground) >= 4.5 and contrast(THEMES[theme].faint, ground) >= 4.5


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_colour_means_one_thing(theme: str) -> None:
    """Nothing of memory, of GPUs or of idle time wears, or nearly wears, the colour of an operation."""
    categories = {word: ink[theme == "dark"] for word, ink in CATEGORY_INKS.items()}
    devices = {word: ink[theme == "dark"] for word, ink in DEVICE_INKS.items()}
    for (word, one), (other, two) in product(
        [*categories.items(), *CAUSE_INKS.items(), *devices.items()], operations(theme).items()
    ):
        assert np.linalg.norm(rgb(one) - rgb(two)) > 25, (word, other)
    for one, two in combinations(categories.values(), 2):
        assert apart(one, two) > 25
    for (word, one), (other, two) in product(devices.items(), [*categories.items(), *CAUSE_INKS.items()]):
        assert np.linalg.norm(rgb(one) - rgb(two)) > 25, (word, other)
    for one, two in combinations(CAUSE_INKS.values(), 2):
        assert apart(one, two) > 25


# ---- Chrome's trace format.


def events(timeline: mk.Timeline) -> list[dict]:
    return json.loads(perfetto(timeline))["traceEvents"]


def test_slices_of_a_thread_nest_and_never_cross(gpipe: mk.Timeline, data_parallel: mk.Timeline) -> None:
    for timeline in (gpipe, data_parallel):
        threads = defaultdict(list)
        for event in events(timeline):
            if event["ph"] == "X":
                threads[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
        for slices in threads.values():
            open_ends: list[float] = []
            for start, minus in sorted(slices):
                while open_ends and open_ends[-1] <= start + 1e-6:
                    open_ends.pop()
                assert not open_ends or start - minus <= open_ends[-1] + 1e-6
                open_ends.append(start - minus)


def test_messages_beyond_forty_at_once_stay_in_the_lane_of_communication() -> None:
    """Threads of 41 messages and more were those of copies to the host, whose slices then overlapped."""
    many = events(mk.simulate(mk.Plan.gpipe(2, 60), 0.0, hop=10.0))
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in many if e["name"] == "thread_name"}
    received = [e for e in many if e["ph"] == "X" and e["name"].startswith("recv")]
    assert len({e["tid"] for e in received}) == 60
    assert {named[e["pid"], e["tid"]].split()[0] for e in received} == {"comm"}


def test_an_arrow_a_message_from_the_sender_to_the_receiver(gpipe: mk.Timeline) -> None:
    flows = defaultdict(dict)
    for event in events(gpipe):
        if event["ph"] in "sf":
            flows[event["id"]][event["ph"]] = event
    assert len(flows) == 2 * 3 * 8  # forward and backward, over three borders, for each micro-batch
    for ends in flows.values():
        assert abs(ends["s"]["pid"] - ends["f"]["pid"]) == 1
        assert ends["s"]["ts"] <= ends["f"]["ts"]
