"""How often per second the live timeline takes in new spans and draws, with 1,000, 10,000 and 50,000 in view.

It measures the widget's own JavaScript in headless Chromium, in a page that acts as the kernel. The widget is given the
traits that `TimelineView` has (the same packing), one after the other, each followed by one whole frame of the picture,
as fast as it takes them; the view follows the run. While a run goes on 50,000 spans are in view at most. Traits cross
neither a network nor a kernel. A run sends 10 per second, so a ratio above 1 leaves room to spare.
"""

from __future__ import annotations

import os
import shutil
import statistics
from base64 import b64encode
from typing import Any

import numpy as np

import mpkit as mk
from benchmarks.pairing import Row, row
from mpkit.views.browser import css, esm
from mpkit.views.timeline.wire import look, pack_spans

SIZES = (1_000, 10_000, 50_000)
RANKS, UPDATES, SENT_HZ = 8, 20, 10.0

PAGE = """
class Model {
  constructor(state) { this.state = state; this.handlers = {}; }
  get(name) { return this.state[name]; }
  on(names, act) { for (const name of names.split(' ')) (this.handlers[name] ??= []).push(act); }
  off() {}
}
const decoded = (text) => new DataView(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
window.queue = [];
window.add = (head, text) => queue.push({ spans_head: head, spans: decoded(text) });
window.begin = async (state) => {
  window.model = new Model(state);
  const widget = timelineWidget();
  await widget.initialize({ model });
  await widget.render({ model, el: document.body.appendChild(document.createElement('div')) });
  window.chart = document.querySelector('.mpkit-timeline').panel.chart;
};
window.take = () => {
  Object.assign(model.state, queue.shift());
  model.handlers['change:spans_head'].forEach((act) => act());
};
// New spans, and the frame that shows it; drawn at once, since a headless screen would make it wait for 60 Hz.
window.update = () => {
  const start = performance.now();
  take();
  chart.draw();
  chart.canvas.getContext('2d').getImageData(0, 0, 1, 1);  // until it is really drawn
  return performance.now() - start;
};
"""


def _spans(count: int) -> Any:
    """Return `count` spans of GPipe on 8 ranks, step after step, in the order of time."""
    one = mk.simulate(mk.Plan.gpipe(RANKS, 16), hop=0.2)
    whole = one.spans[one.spans["end"] > one.spans["start"]]
    steps = -(-count // len(whole))
    spans = np.tile(whole, steps)
    step = np.repeat(np.arange(steps), len(whole))
    for column in ("start", "end"):
        spans[column] += step * one.step_time
    spans["step"], spans["cause"] = step, -1
    return spans[np.argsort(spans["end"], kind="stable")][:count]


def _traits(count: int) -> list[tuple[dict[str, Any], str]]:
    """Return what the kernel sets: `count` spans, each time 1 % newer ones."""
    small = max(1, count // 100)
    spans = _spans(count + UPDATES * small)
    windows = (spans[at * small : at * small + count] for at in range(UPDATES + 1))
    packed = (pack_spans(window, [""], at * small, 0.0) for at, window in enumerate(windows))
    return [(head, b64encode(columns).decode()) for head, columns in packed]


def _milliseconds(page: Any, count: int) -> float:
    """Return the median time of an update in milliseconds."""
    messages = _traits(count)
    page.set_content("<!doctype html><meta charset=utf-8><body style='width:1200px'></body>")
    page.add_style_tag(content=css())
    page.add_script_tag(content=esm() + PAGE, type="module")
    page.wait_for_function("window.begin !== undefined")
    for head, text in messages:
        page.evaluate("([head, text]) => add(head, text)", [head, text])
    labels = [f"GPU {rank}" for rank in range(RANKS)]
    page.evaluate("(state) => begin(state)", {"look": look(), "labels": labels, "live": True, "clock": ""})
    page.evaluate(f"while (queue.length > {UPDATES}) take()")
    times = page.evaluate("Array.from({ length: queue.length }, update)")
    assert page.evaluate("chart.store.count") == count
    return statistics.median(times)


def measure() -> list[Row]:
    """Measure the updates per second at each size, beside the ten per second that a run sends."""
    from playwright.sync_api import sync_playwright

    path = shutil.which(os.environ.get("CHROMIUM") or "chromium") or shutil.which("google-chrome")
    if path is None:
        print("bench_widget: no Chromium (set CHROMIUM=/path/to/chrome): left out")
        return []
    rows = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        for count in SIZES:
            rate = 1000 / _milliseconds(page, count)
            name = f"live timeline, updates a second at {count:,} spans"
            against = "10 a second sent; 1 % newer each time, headless Chromium"
            rows.append(row(name, rate, "1/s", rate / SENT_HZ, against))
        browser.close()
    return rows
