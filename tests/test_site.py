"""The site: pages that open from a file. Its runs are recorded where it is built; here stand-ins take their place."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mpkit as mk
from mpkit.views.commands.demo_strategies import SEEN
from scripts.site import GALLERY, PICTURES, RUNS, Shown, write

README = Path(__file__).parents[1] / "README.md"


def stand_in(ranks: int) -> Any:
    timeline = mk.simulate(mk.Plan.gpipe(ranks, 4) if ranks > 1 else mk.Plan.serial())
    return SimpleNamespace(ranks=[*range(ranks)], timeline=lambda hardware=None: timeline)


@pytest.mark.parametrize("shown", GALLERY, ids=lambda shown: shown.name)
def test_the_readme_shows_each_result_as_its_call_draws_it(shown: Shown) -> None:
    stored = (PICTURES / f"{shown.name}.svg").read_text(encoding="utf-8")
    assert stored == shown.draw() + "\n", "draw them anew: python -m scripts.site --pictures"
    text = README.read_text(encoding="utf-8")
    assert (
        f"{shown.sentence}\n\n```python\n{shown.call}\n```\n\n![{shown.title}](docs/pictures/{shown.name}.svg)"
        in text
    )


def test_every_page_of_the_site_is_reached_from_its_index(tmp_path: Path) -> None:
    write(tmp_path, {name: (name, stand_in(ranks)) for name, ranks in RUNS.items()})
    assert len(RUNS) == 12 and set(RUNS) <= set(SEEN)
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    linked = {tmp_path / href for href in re.findall(r'href="([^"#:]+)"', index)}
    assert {*linked, tmp_path / "index.html"} == {*tmp_path.rglob("*.html")}
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r'(src|href)="(https?:)?//', text), f"{page.name} asks another server"
