"""`make site`: static pages that need no kernel and open from a file, in build/site.

index       what is there, with a picture of each
explorer    schedules with sliders, one's own schedule as text, links that hold what is set
runs        twelve runs of a small GPT, recorded while the site is built: as they ran, and replayed on two GPUs' links
gallery     results of mpkit as pictures, each with one sentence and the call that makes it
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import mpkit as mk
from mpkit.cli.demo import find_strategy, strategies
from mpkit.common.display import draw, image
from mpkit.common.safe_text import escape
from mpkit.data import text_batches
from mpkit.models import GPT, next_token_loss
from mpkit.views.page.html import html
from mpkit.views.theme import THEMES

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
STEPS, MICROBATCHES = 3, 4

RUNS = {
    "serial": 1, "naive": 4, "gpipe": 4, "gpipe-recompute": 4, "1f1b": 4, "zb-h1": 4, "dp": 4, "ddp": 4, "zero1": 4,
    "zero3": 4, "tp": 2, "2d": 4,
}  # fmt: skip
"""The demo's strategies that are recorded, each with its ranks."""

LINKS = {"on GPUs with NVLink": "4x-titan-rtx-nvlink", "on GPUs without": "4x-titan-rtx"}
"""The machines that each run is replayed on."""


@dataclass(frozen=True)
class Shown:
    """A result in the gallery: one sentence on what it shows, and the call that makes it; `name` is its picture's."""

    name: str
    title: str
    sentence: str
    call: str

    def result(self) -> Any:
        """Return what the call returns."""
        return eval(self.call, {"mk": mk, "GPT": GPT})

    def draw(self) -> str:
        """Return its picture, as SVG."""
        return str(self.result().to_svg())


GALLERY = (
    Shown(
        "schedule", "A schedule", "Hatching is the bubble: the time in which a GPU waits.",
        'mk.simulate(mk.Plan.pipeline("1f1b", 4, 8))',
    ),
    Shown(
        "compare", "Why one is slower", "Two schedules side by side, and what the difference is made of.",
        'mk.compare(gpipe=mk.simulate(mk.Plan.gpipe(4, 8)), zb_h1=mk.simulate(mk.Plan.pipeline("zb_h1", 4, 8)))',
    ),
    Shown(
        "fits", "Will it fit?", "Each rank's memory by category beside the device's, before you have the GPUs.",
        'mk.fits("llama3-8b", mk.Plan.zero(3, 8, precision="bf16"), "8x-a100-nvlink", global_batch=8, sequence=4096)',
    ),
)  # fmt: skip


def record(runs: Mapping[str, int] = RUNS) -> dict[str, tuple[str, mk.Run]]:
    """Train a small GPT with each strategy; return its title and its run.

    Raises:
        RankFailed: a run failed; then there is no site.
    """
    torch.manual_seed(0)
    model, data = GPT(layers=8, width=96, length=64), text_batches(batch=32, length=64, steps=STEPS)
    found = {}
    for name, ranks in runs.items():
        title, plan, _ = find_strategy(name, ranks, MICROBATCHES)
        with mk.Cluster(ranks=ranks, device="cpu") as cluster:
            run = cluster.train(
                model, data, plan, loss=next_token_loss, optimizer=torch.optim.AdamW, steps=STEPS, show=False
            )
            run.wait()
        found[name] = title, run
    return found


def write(folder: Path, runs: Mapping[str, tuple[str, mk.Run]]) -> None:
    """Write the site into an empty folder."""
    shown = {"GPipe": mk.simulate(mk.Plan.gpipe(4, 8)), "ZB-H1": mk.simulate(mk.Plan.pipeline("zb_h1", 4, 8))}
    explorer = html(shown, "Explorer: pipeline schedules", intro=EXPLORER, try_it=(4, 8))
    (folder / "explorer.html").write_text(explorer, encoding="utf-8")
    (folder / "runs").mkdir()
    for name, (title, run) in runs.items():
        timeline = run.timeline()
        ranks = timeline.world_size
        here = {"on the virtual clock": timeline}
        here |= {words: run.timeline(hardware=machine) for words, machine in LINKS.items() if ranks > 1}
        intro = f"{strategies()[name]['seen']}\n\n{REPLAYED if ranks > 1 else ALONE}"
        page = html(here, f"{title} on {ranks} rank{'s' * (ranks > 1)}", intro=intro)
        (folder / "runs" / f"{name}.html").write_text(page, encoding="utf-8")
    (folder / "gallery.html").write_text(_page("Gallery", _gallery()), encoding="utf-8")
    (folder / "index.html").write_text(_page("mpkit", _index(runs)), encoding="utf-8")


EXPLORER = (
    "Choose a schedule below, move the sliders, or write a schedule of your own, a line per rank. The address of the "
    "page holds what you have set: send it, and others see the same."
)

REPLAYED = (
    "The same recorded run three times: on the virtual clock, on which each rank has a core of this machine to itself, "
    "and replayed on four GPUs with NVLink and without. What changes is the time that computing and messages take; who "
    "waits for whom follows from that."
)

ALONE = (
    "The recorded run on the virtual clock: its rank has a core of this machine to itself. Nothing is sent."
)


def _index(runs: Mapping[str, tuple[str, mk.Run]]) -> str:
    listed = "".join(
        f'<li><a href="runs/{name}.html">{escape(title)}</a>, {run.trace.world_size} '
        f"rank{'s' * (run.trace.world_size != 1)}: {escape(strategies()[name]['seen'])}</li>"
        for name, (title, run) in runs.items()
    )
    return (
        "<p>mpkit is a kit to learn, try and plan parallel training in PyTorch, from a notebook. These pages need no "
        "installation, no kernel and no network.</p>"
        f'<h2><a href="explorer.html">Explorer</a></h2><p>{EXPLORER}</p>{_picture(GALLERY[0])}'
        f"<h2>Runs</h2><p>A GPT with 8 blocks, trained for {STEPS} steps with each strategy on CPU processes. Zoom in, "
        f"search, select an operation, show the critical path.</p><ul>{listed}</ul>"
        f'<h2><a href="gallery.html">Gallery</a></h2><p>What mpkit draws, with the call that makes each picture.</p>'
    )


def _gallery() -> str:
    return "".join(
        f"<h2>{escape(each.title)}</h2><p>{escape(each.sentence)}</p>{_picture(each)}<pre>{escape(each.call)}</pre>"
        for each in GALLERY
    )


def _picture(shown: Shown) -> str:
    result = shown.result()
    return f'<div class="picture">{image(partial(draw, result, "svg"), str(result))}</div>'


def _page(title: str, body: str) -> str:
    def rules(name: str) -> str:
        theme = THEMES[name]
        return f"--ground:{theme.ground};--text:{theme.text};--faint:{theme.faint};--line:{theme.line};"

    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f'<link rel="icon" href="data:,"><style>:root{{{rules("light")}}}@media (prefers-color-scheme: dark)'
        f"{{:root{{{rules('dark')}}}}}body{{margin:0;background:var(--ground);color:var(--text);"
        "font:16px/1.55 system-ui,sans-serif}main{max-width:60rem;margin:0 auto;padding:1.5rem 1rem 3rem}"
        "a{color:inherit;text-underline-offset:3px}li{margin:.3rem 0}"
        ".picture{border:1px solid var(--line);border-radius:10px;overflow:hidden;display:flow-root}"
        ".picture img{display:block}"
        "pre{overflow-wrap:anywhere;border-left:3px solid var(--line);"
        "padding:.4rem .8rem;font-size:13px;white-space:pre-wrap}"
        f"</style></head><body><main><h1>{escape(title)}</h1>{body}</main></body></html>\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the site, and say where it is, how large, and how long it took; --pictures: draw README's alone."""
    parser = argparse.ArgumentParser(prog="make site", description=main.__doc__)
    parser.add_argument(
        "--pictures", action="store_true", help="write the gallery's pictures into docs/pictures"
    )
    if parser.parse_args(arguments).pictures:
        for each in GALLERY:
            (PICTURES / f"{each.name}.svg").write_text(each.draw() + "\n", encoding="utf-8")
        return 0
    folder, began = ROOT / "build" / "site", time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write(folder, record())
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{size / 1e6:.1f} MB in {time.monotonic() - began:.0f} s; open {folder / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
