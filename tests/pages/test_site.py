"""The site: pages that open from a file. Its runs are recorded where it is built; here stand-ins take their place."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mpkit as mk
from mpkit.cli.demo import strategies
from scripts.site import GALLERY, PICTURES, RUNS, Shown, write

README = Path(__file__).parents[2] / "README.md"


def played(plan: mk.Plan) -> mk.Trace:
    """A trace without ranks: a small GPT on tensors without content."""
    tokens = torch.empty(8, 16, dtype=torch.long, device="meta")
    return mk.trace_fake(
        lambda: mk.models.GPT(layers=4, width=16), plan, batch=(tokens, tokens), loss=mk.models.next_token_loss,
        optimizer=torch.optim.AdamW, steps=2, hardware="8x-a100-nvlink",
    )  # fmt: skip


@cache
def stand_in(ranks: int) -> Any:
    """A run on one rank, or on four."""
    trace = played(mk.Plan.gpipe(4, 4) if ranks > 1 else mk.Plan.serial())
    return SimpleNamespace(trace=trace, timeline=lambda hardware=None: mk.Timeline.of(trace, hardware))


@pytest.mark.parametrize("shown", GALLERY, ids=lambda shown: shown.name)
def test_the_readme_shows_each_result_as_its_call_draws_it(shown: Shown) -> None:
    stored = (PICTURES / f"{shown.name}.svg").read_text(encoding="utf-8")
    assert stored == shown.draw() + "\n", "draw them anew: python -m scripts.site --pictures"
    text = README.read_text(encoding="utf-8")
    assert (
        f"{shown.sentence}\n\n```python\n{shown.call}\n```\n\n![{shown.title}](docs/pictures/{shown.name}.svg)"
        in text
    )


@pytest.mark.soak
def test_every_page_of_the_site_is_reached_from_its_index(tmp_path: Path) -> None:
    write(tmp_path, {name: (name, stand_in(min(ranks, 2))) for name, ranks in RUNS.items()})
    assert len(RUNS) == 12 and set(RUNS) <= set(strategies())
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    linked = {tmp_path / href for href in re.findall(r'href="([^"#:]+)"', index)}
    assert {*linked, tmp_path / "index.html"} == {*tmp_path.rglob("*.html")}
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r'(src|href)="(https?:)?//', text), f"{page.name} asks another server"
