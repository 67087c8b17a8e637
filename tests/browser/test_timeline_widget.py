"""The timeline in a real browser: as a page that holds its data, and as a live widget fed in batches."""

import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

import mpkit as mk
from mpkit.plan.mesh import Mesh
from mpkit.trace import Kind
from mpkit.views.browser import css, esm
from mpkit.views.drawing.colours import INKS, Key
from mpkit.views.page.html import html
from mpkit.views.timeline.widget import TimelineView
from tests.limits import wait_for
from tests.views.conftest import repeated

NewPage = Callable[..., Page]
Screenshot = Callable[[Page, str], None]


def open_html(page: Page, folder: Path, timelines: Any, **options: Any) -> None:
    path = folder / "page.html"
    path.write_text(html(timelines, **options), encoding="utf-8")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn=true]")
    page.wait_for_function(
        "[...document.querySelectorAll('.mpkit-timeline')].every((each) => each.panel.chart.frames > 0)"
    )
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


SCROLLS = """() => document.querySelector(".mpkit-stage").dispatchEvent(
  new WheelEvent("wheel", { deltaY: -240, bubbles: true, cancelable: true }))"""
"""Whether the wheel alone is left to the page."""

CHART = "document.querySelector('.mpkit-timeline').panel.chart"


def drawn(page: Page) -> None:
    """Wait until the first chart has drawn all that was asked for."""
    page.wait_for_function(f"{CHART}.asked === 0")


def window(page: Page) -> list[float]:
    """The times that the first chart shows."""
    return page.evaluate(f"{CHART}.times")


def sees(page: Page, *times: float) -> None:
    """Wait until these are the times that the first chart shows."""
    with suppress(AssertionError):
        wait_for(lambda: window(page) == pytest.approx(times, rel=1e-6))
    assert window(page) == pytest.approx(times, rel=1e-6)


def place(page: Page, time: float, rank: int = 0) -> tuple[float, float]:
    """Where on the page a moment of a rank's compute row is drawn."""
    drawn(page)
    return tuple(
        page.evaluate(
            """([time, rank]) => {
              const { chart } = document.querySelector('.mpkit-timeline').panel;
              const [t0, t1] = chart.times;
              const row = chart.placed.rows.find((row) => row.rank === rank && row.part === 'compute');
              const box = chart.canvas.getBoundingClientRect();
              return [box.left + chart.left + (time - t0) / (t1 - t0) * chart.width, box.top + row.y + row.height / 3];
            }""",
            [time, rank],
        )
    )


def colour(page: Page, time: float, rank: int = 0) -> str:
    """The colour of the canvas there, as #rrggbb; "" where it is clear."""
    x, y = place(page, time, rank)
    red, green, blue, alpha = page.evaluate(
        """([x, y]) => {
          const { canvas } = document.querySelector('.mpkit-timeline').panel.chart;
          const box = canvas.getBoundingClientRect();
          const ratio = canvas.width / box.width;
          const at = [(x - box.left) * ratio, (y - box.top) * ratio];
          const pixel = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
          pixel.drawImage(canvas, at[0], at[1], 1, 1, 0, 0, 1, 1);
          return [...pixel.getImageData(0, 0, 1, 1).data];
        }""",
        [x, y],
    )
    return f"#{red:02x}{green:02x}{blue:02x}" if alpha else ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_hover_zoom_pan_keys_and_legend(
    new_page: NewPage, tmp_path: Path, screenshot: Screenshot, scheme: str
) -> None:
    page = new_page(color_scheme=scheme)
    open_html(page, tmp_path, repeated(mk.simulate(mk.Plan.gpipe(4, 8), hop=0.25), 3))
    whole = window(page)
    tip = page.locator(".mpkit-tip")
    expect(tip).to_be_hidden()

    # Hover: an operation, and idle time with what it waited for.
    page.mouse.move(*place(page, 2.5))
    expect(tip).to_contain_text("forward · micro-batch 2")
    expect(tip).to_contain_text("GPU 0")
    screenshot(page, f"hover-{scheme}")
    page.mouse.move(*place(page, 0.6, rank=1))
    expect(tip).to_contain_text("idle: wait")

    # With Ctrl the wheel zooms around the pointer: the moment under it stays under it. Alone it scrolls the page.
    x, y = place(page, 10.0)
    page.mouse.move(x, y)
    assert page.evaluate(SCROLLS) and window(page) == whole
    page.keyboard.down("Control")
    for _ in range(4):
        length = window(page)[1] - window(page)[0]
        page.mouse.wheel(0, -240)  # one at a time: a browser may join several into one
        page.wait_for_function(f"{CHART}.times[1] - {CHART}.times[0] < {length}")
    page.keyboard.up("Control")
    assert window(page)[1] - window(page)[0] < 0.5 * (whole[1] - whole[0])
    assert abs(place(page, 10.0)[0] - x) < 2
    screenshot(page, f"zoomed-{scheme}")

    # Dragging pans: what was under the pointer moves along.
    t0 = window(page)[0]
    page.mouse.down()
    page.mouse.move(x - 120, y, steps=5)
    page.mouse.up()
    page.wait_for_function(f"{CHART}.times[0] > {t0}")
    assert abs(place(page, 10.0)[0] - (x - 120)) < 8

    # Keys, where the picture has the focus; a double click shows all again.
    length = window(page)[1] - window(page)[0]
    page.locator(".mpkit-stage").focus()
    page.keyboard.press("+")
    page.wait_for_function(f"{CHART}.times[1] - {CHART}.times[0] < {length}")
    before = window(page)[0]
    page.keyboard.press("ArrowLeft")
    page.wait_for_function(f"{CHART}.times[0] < {before}")
    page.mouse.dblclick(x, y)
    sees(page, *whole)

    # The legend hides what is clicked.
    page.get_by_role("button", name="show or hide forward").click()
    drawn(page)
    assert colour(page, 0.5) != getattr(INKS[Key.FORWARD], scheme)


def test_names_are_never_read_as_html(new_page: NewPage, tmp_path: Path) -> None:
    hostile = (
        "<img src=x onerror=\"document.title='caught'\"></script><script>document.title='caught'</script>"
    )
    gpipe = mk.simulate(mk.Plan.gpipe(2, 2))
    spans = gpipe.spans.copy()
    spans["name"] = len(gpipe.names)
    page = new_page()
    open_html(
        page, tmp_path, {hostile: replace(gpipe, spans=spans, names=[*gpipe.names, hostile], notes=[hostile])}
    )
    page.mouse.move(*place(page, 0.5))
    expect(page.locator(".mpkit-tip")).to_contain_text("<img src=x")
    assert page.title() != "caught"


def on_mesh(mesh: Mesh, steps: int = 1) -> mk.Timeline:
    """GPipe's staircase on a mesh: the ranks of a stage do the same, each a little later than the one before."""
    one = repeated(mk.simulate(mk.Plan.gpipe(mesh.pp, 8), hop=0.25), steps)
    parts = []
    for rank in range(mesh.size):
        part = one.spans[one.spans["rank"] == mesh.place(rank).pp].copy()
        part["rank"], part["cause"], part["peer"] = rank, -1, -1
        for bound in ("start", "end"):
            part[bound] += 0.1 * (rank % (mesh.size // mesh.pp)) / mesh.size
        parts.append(part)
    meta = {"plan": json.dumps(vars(mesh)), "device": "cpu"}
    return mk.Timeline(np.concatenate(parts), one.names, one.held[:0], mesh.size, "virtual", meta)


def lanes(page: Page) -> list[int]:
    """The ranks whose compute rows are drawn."""
    drawn(page)
    return page.evaluate(
        f"{CHART}.placed.rows.filter((row) => row.part === 'compute').map((row) => row.rank)"
    )


def click_head(page: Page, group: int) -> None:
    """On the header of a group, and wait until it is folded, or no longer. A frame says nothing: the pointer's way to
    the header may ask for one too, and it may be drawn before the click."""
    drawn(page)
    x, y, folded = page.evaluate(
        """(group) => {
          const { chart } = document.querySelector('.mpkit-timeline').panel;
          const head = chart.placed.heads[group];
          const box = chart.canvas.getBoundingClientRect();
          return [box.left + 60, box.top + head.y + head.height / 2, chart.lanes.folded.has(group)];
        }""",
        group,
    )
    page.mouse.click(x, y)
    page.wait_for_function(f"{CHART}.lanes.folded.has({group}) !== {str(folded).lower()}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_groups_fold_and_unfold_on_a_click(
    new_page: NewPage, tmp_path: Path, screenshot: Screenshot, scheme: str
) -> None:
    page = new_page(color_scheme=scheme)
    open_html(page, tmp_path, on_mesh(Mesh(pp=2, dp=2, tp=2)))
    words = page.get_by_role("img").first.get_attribute("aria-label")
    assert words and "8 lanes in 4 groups" in words
    assert lanes(page) == list(range(8))
    screenshot(page, f"groups-{scheme}")
    click_head(page, 1)
    assert lanes(page) == [0, 1, 2, 4, 5, 6, 7]
    assert colour(page, 0.8, rank=2) == getattr(INKS[Key.FORWARD], scheme)
    click_head(page, 3)
    assert lanes(page) == [0, 1, 2, 4, 5, 6]
    screenshot(page, f"groups-folded-{scheme}")
    # Another click unfolds it; the button does it with all, and neither zooms.
    whole = window(page)
    click_head(page, 1)
    assert lanes(page) == [0, 1, 2, 3, 4, 5, 6] and window(page) == whole
    button = page.get_by_role("button", name="Fold")
    button.click()
    drawn(page)
    assert lanes(page) == [0, 2, 4, 6]
    expect(button).to_have_attribute("aria-pressed", "true")
    button.click()
    drawn(page)
    assert lanes(page) == list(range(8))
    # The pointer finds what lies below a header.
    page.mouse.move(*place(page, 1.0, rank=5))
    expect(page.locator(".mpkit-tip")).to_contain_text("rank 5 pp1 dp0 tp1")


MODEL = """
// What anywidget gives a widget, as far as this one uses it.
class Model {
  constructor(state) { this.state = state; this.handlers = []; }
  get(name) { return this.state[name]; }
  on(names, act) { for (const name of names.split(' ')) this.handlers.push([name, act]); }
  off(names, act) { this.handlers = this.handlers.filter(([name, done]) => done !== act || !names.includes(name)); }
  set(name, value) { this.state[name] = value; this.trigger('change:' + name); }
  save_changes() {}
  trigger(name, ...values) { this.handlers.filter(([known]) => known === name).forEach(([, act]) => act(...values)); }
}
const BYTES = ['spans', 'tracks', 'path_slack'];
const bytes = (text) => new DataView(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
window.open_widget = async (state) => {
  const packed = Object.fromEntries(BYTES.map((name) => [name, bytes(state[name])]));
  window.model = new Model({ ...state, ...packed });
  const widget = timelineWidget();
  await widget.initialize({ model });
  document.body.replaceChildren();
  window.close_widget = await widget.render({ model, el: document.body.appendChild(document.createElement('div')) });
};
window.set_traits = (state) => Object.entries(state).forEach(([name, value]) => {
  model.state[name] = BYTES.includes(name) ? bytes(value) : value;
}) || Object.keys(state).forEach((name) => model.trigger('change:' + name));
"""


class Live:
    """A TimelineView whose traits go to a page."""

    TRAITS = (
        "title", "labels", "groups", "bubble", "step_time", "of", "clock", "note", "live", "room", "widest", "said",
        "waits", "table", "look", "spans_head", "tracks_head", "has_path", "path_shown", "path_head",
    )  # fmt: skip
    BYTES = ("spans", "tracks", "path_slack")

    def __init__(self, page: Page, **options: Any) -> None:
        self.page, self.view = page, TimelineView(**options)

    def state(self) -> dict[str, Any]:
        found = {name: getattr(self.view, name) for name in self.TRAITS}
        return {**found, **{name: b64encode(getattr(self.view, name)).decode() for name in self.BYTES}}

    def load(self) -> None:
        """The page, or the page again after a reload."""
        self.page.set_content("<!doctype html><meta charset=utf-8><body></body>")
        self.page.add_style_tag(content=css())
        self.page.add_script_tag(content=esm() + MODEL + "window.ready = true;", type="module")
        self.page.wait_for_function("window.ready")
        self.page.evaluate("(state) => open_widget(state)", self.state())

    def deliver(self) -> None:
        """Traits to the page."""
        self.page.evaluate(
            "(state) => set_traits(state)", {k: v for k, v in self.state().items() if k != "look"}
        )

    @property
    def spans(self) -> int:
        return int(self.page.locator(".mpkit-timeline").get_attribute("data-spans") or 0)


def in_batches(timeline: mk.Timeline, count: int) -> Iterator[np.ndarray]:
    yield from np.array_split(timeline.spans[np.argsort(timeline.spans["end"], kind="stable")], count)


def test_a_live_widget_fills_follows_and_comes_back(new_page: NewPage, screenshot: Screenshot) -> None:
    timeline = repeated(mk.simulate(mk.Plan.gpipe(4, 8), hop=0.25), 4)
    page = new_page()
    live = Live(page, labels=[f"GPU {rank}" for rank in range(4)], title="A run")
    live.view.live = True
    live.load()
    ends, bubbles = [], []
    for batch in in_batches(timeline, 12):
        live.view.append(batch, timeline.names)
        live.view.flush()
        live.deliver()
        ends.append(window(page)[1])
        bubbles.append(page.locator(".mpkit-figure b").first.inner_text())
        if len(ends) == 7:
            screenshot(page, "live")
    assert ends == sorted(ends) and ends[-1] == timeline.spans["end"].max()  # the newest is always in view
    assert len(set(bubbles)) > 2 and bubbles[-1] == "30.4 %"
    expect(page.locator(".mpkit-figure").first).to_contain_text("bubble, step 3")
    # Zoomed in, it follows with what was zoomed to.
    page.evaluate("document.querySelector('.mpkit-timeline').panel.chart.zoom(0.25)")
    assert window(page)[1] == ends[-1] and window(page)[0] > 60
    # The page is loaded again, and has what was there.
    live.load()
    assert live.spans == len(timeline.spans)
    # An operation that is selected stays selected while the newest spans take the place of the older ones.
    page.evaluate(f"{CHART}.selected = {{ rank: 0, span: 300 }}")
    begins = page.evaluate(f"{CHART}.store.value('start', 300)")
    live.view._kept, live.view._first = live.view._kept[100:], 100
    live.view.flush()
    live.deliver()
    assert page.evaluate(f"{CHART}.selected.span") == 200
    assert page.evaluate(f"{CHART}.store.value('start', 200)") == begins
    # The run ends, and its whole timeline takes the place of its parts: the newest steps stay in view.
    live.view.replace(timeline)
    live.view.live = False
    live.deliver()
    assert live.spans == len(timeline.spans)
    assert window(page) == pytest.approx([ends[-1] / 4, ends[-1]], rel=1e-6)
    page.get_by_role("button", name="Fit").click()
    sees(page, 0, ends[-1])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1100, 400])
def test_axe_finds_nothing_serious(new_page: NewPage, tmp_path: Path, scheme: str, width: int) -> None:
    page = new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
    gpipe = mk.simulate(mk.Plan.gpipe(4, 8), hop=0.25)
    open_html(page, tmp_path, {"GPipe": repeated(gpipe, 6), "naive": mk.simulate(mk.Plan.gpipe(4, 1))})
    page.get_by_text("The figures as a table").first.click()
    found = Axe().run(page).response["violations"]
    serious = [(each["id"], each["help"], [node["target"] for node in each["nodes"]]) for each in found
               if each["impact"] in ("serious", "critical")]  # fmt: skip
    assert serious == []


def test_a_hang_is_drawn_with_its_reason(new_page: NewPage, screenshot: Screenshot) -> None:
    page = new_page()
    timeline = mk.simulate(mk.Plan.gpipe(2, 2))
    waiting = [{"rank": 1, "start": float(timeline.spans["end"].max()), "words": "waits for rank 0 (recv)"}]
    live = Live(page, timeline=replace(timeline, meta={**timeline.meta, "waiting": waiting}))
    live.load()
    drawn(page)
    assert window(page)[1] == pytest.approx(1.25 * waiting[0]["start"])
    expect(page.get_by_role("img", name="GPU 1 waits for rank 0 (recv)")).to_be_visible()
    assert colour(page, 0.96 * window(page)[1], rank=1) not in ("", colour(page, 0.96 * window(page)[1]))
    screenshot(page, "hang")


def test_a_search_keeps_what_it_finds_and_pales_the_rest(
    new_page: NewPage, tmp_path: Path, screenshot: Screenshot
) -> None:
    page, timeline = new_page(), mk.simulate(mk.Plan.gpipe(4, 8), hop=0.25)
    names = [*timeline.names, "model.layers.7.mlp", "block17"]
    spans = timeline.spans.copy()
    forwards = np.flatnonzero(spans["kind"] == Kind.FORWARD)
    spans["name"][forwards] = len(names) - 1
    seventh = forwards[(spans["rank"][forwards] == 2) & (spans["microbatch"][forwards] < 3)]
    spans["name"][seventh] = len(names) - 2
    timeline = replace(timeline, spans=spans, names=names)
    open_html(page, tmp_path, timeline)
    blue = INKS[Key.FORWARD].light
    assert colour(page, 0.85) == colour(page, 4.35, rank=2) == blue
    field = page.get_by_role("searchbox", name='Search operations, such as "all_gather"')
    page.get_by_role("group", name="Timeline.").focus()
    page.keyboard.press("/")
    expect(field).to_be_focused()

    for words, found in (
        ("Layer 7", "3 found, 3.00 s"), ("rank 3", "found, "), ("rank 2 layer 7 micro-batch 1", "1 found"),
        ("all_gather", "none found"), ("receive GPU 1", "16 found, 4.00 s"), ("forward block", "29 found"),
    ):  # fmt: skip
        field.fill(words)
        expect(page.locator(".mpkit-found")).to_contain_text(found)

    field.fill("layer 7")
    drawn(page)
    assert colour(page, 4.35, rank=2) == blue != colour(page, 0.85)
    screenshot(page, "search")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    expect(page.locator(".mpkit-said").first).to_contain_text("model.layers.7.mlp · micro-batch 1, on GPU 2")
    page.keyboard.press("Escape")
    drawn(page)
    assert colour(page, 0.85) == blue
    expect(page.get_by_role("group", name="Timeline.")).to_be_focused()
