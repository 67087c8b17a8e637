"""The page that needs nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import torch

import mpkit as mk
from mpkit.views.page.html import html


class Page(HTMLParser):
    """What a browser would load, and the texts of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.words: list[str] = []
        self._in: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.loads += [
            found[name] or "" for name in ("src", "href", "srcset", "data", "action") if name in found
        ]
        self._in = tag if tag in ("script", "style") else None
        if tag == "script":
            self.scripts.append((found, ""))

    def handle_endtag(self, tag: str) -> None:
        self._in = None

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            attrs, text = self.scripts.pop()
            self.scripts.append((attrs, text + data))
        elif self._in is None:
            self.words.append(data)


def test_nothing_is_loaded(gpipe: mk.Timeline) -> None:
    text = html({"one": gpipe, "two": gpipe})
    page = Page(text)
    assert [load for load in page.loads if not load.startswith(("#", "data:,"))] == []
    assert not re.findall(r"@import|url\((?!#)|import\s*\(|\bfetch\b|XMLHttpRequest", text)
    assert {found for found in re.findall(r"https?://[^\"'\s)]+", text)} == {"http://www.w3.org/2000/svg"}


def test_the_summary_compares_strategies() -> None:
    naive, gpipe = (
        mk.simulate(mk.Plan.gpipe(4, 1), forward=8, input_grad=8, weight_grad=8),
        mk.simulate(mk.Plan.gpipe(4, 8)),
    )
    words = Page(html({"naive": naive, "GPipe": gpipe}, facts={"GPipe": {"in theory": "27.3 %"}})).words
    assert {"75.0 %", "27.3 %", "2.91 ×", "8 micro-batches", "in theory"} <= set(words)


def test_a_badge_says_whether_a_run_is_equal_to_serial_training(cluster: mk.Cluster) -> None:
    data = [(torch.randn(4, 2), torch.randn(4, 1))]
    how = {
        "loss": torch.nn.functional.mse_loss,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
        "steps": 2,
    }
    run = cluster.resized(1).train(torch.nn.Linear(2, 1), data, **how).wait()
    assert "equal to serial training in steps 1 and 2" in Page(html(run.timeline())).words
    assert not any("serial training" in words for words in Page(html(run.timeline("8x-h100-pcie"))).words)


def test_strings_stay_strings(hostile: mk.Timeline) -> None:
    name = "</script><script>alert(3)</script>"
    page = Page(html({name: hostile}, title=name, intro=name, facts={name: {name: name}}))
    kinds = [attrs.get("type") for attrs, _ in page.scripts]
    data, spans, slack = "application/json", "text/plain", "text/plain"
    assert kinds == [data, spans, slack, "application/json", "module"]
    (state,) = [json.loads(text)["state"] for attrs, text in page.scripts if "data-of" in attrs]
    assert state["note"] == hostile.notes[0]
