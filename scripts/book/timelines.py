"""The interactive timelines of the book: recorded while it is built, each an HTML page of its own, shown in a frame.

record      train a small GPT with each plan, on CPU processes
write       one page per run, and one with all of them and the schedules to try
frame       the Markdown that shows such a page
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch

import mpkit as mk
from mpkit.data import text_batches
from mpkit.models import GPT, next_token_loss
from mpkit.views.commands.demo_strategies import SEEN, STRATEGIES
from mpkit.views.page.html import html

__all__ = ["SHOWN", "Shown", "frame", "record", "write"]

STEPS, MICROBATCHES = 3, 4
EVERYTHING = "all"
"""The name of the page that has all runs, and schedules to try with sliders."""


@dataclass(frozen=True)
class Shown:
    """One recorded run, and where the book shows it.

    Attributes:
        strategy: a name of the demo's strategies.
        ranks: how many processes train.
        notebook: the tutorial that has it.
        after: a line of the code cell below which it stands.
    """

    strategy: str
    ranks: int
    notebook: str
    after: str


SHOWN = (
    Shown("naive", 4, "01-pipeline-bubbles", "naive.timeline().step(2).show()"),
    Shown("gpipe", 4, "00-start-here", "timeline.step(5).show()"),
    Shown("1f1b", 4, "04-schedules", 'print(mk.Plan.pipeline("1f1b", 4, 8).build())'),
    Shown("dp", 4, "02-data-parallel", "dp.timeline().step(3).show()"),
    Shown("ddp", 4, "02-data-parallel", "ddp = train(mk.Plan.ddp(4))"),
    Shown("zero3", 4, "03-zero", "zero3.timeline().step(2).show()"),
    Shown("tp", 2, "06-tensor-parallel", "tp = train(mk.Plan.tp(2))"),
    Shown("3d", 8, "07-three-dimensions", "run.timeline().step(2).show()"),
)


def record() -> dict[str, tuple[str, mk.Timeline]]:
    """Train with each plan; return each strategy's title and the timeline of its run.

    Raises:
        RankFailed: a run failed; then there is no book.
    """
    torch.manual_seed(0)
    model, data = GPT(layers=8, width=96, length=64), text_batches(batch=32, length=64, steps=STEPS)
    found = {}
    for shown in SHOWN:
        title, plan = STRATEGIES[shown.strategy](shown.ranks, MICROBATCHES)
        with mk.Cluster(ranks=shown.ranks, device="cpu") as cluster:
            run = cluster.train(
                model, data, plan, loss=next_token_loss, optimizer=torch.optim.AdamW, steps=STEPS, show=False
            )
            run.wait()
        found[shown.strategy] = title, run.timeline()
    return found


def write(runs: dict[str, tuple[str, mk.Timeline]], folder: Path) -> None:
    """Write a page for each run, and one for all of them."""
    folder.mkdir(parents=True)
    for strategy, (title, timeline) in runs.items():
        page = html(timeline, f"{title} on {timeline.world_size} ranks", intro=SEEN[strategy])
        (folder / f"{strategy}.html").write_text(page, encoding="utf-8")
    together = html(
        dict(runs.values()),
        f"{STEPS} steps with each strategy",
        captions={title: SEEN[strategy] for strategy, (title, _) in runs.items()},
        try_it=(4, 8),
    )
    (folder / f"{EVERYTHING}.html").write_text(together, encoding="utf-8")


def frame(strategy: str, title: str, root: str = "") -> str:
    """Return the Markdown that shows a run's page; `root` leads from the page to the top of the site.

    >>> frame("dp", "DP", "../")
    '<iframe class="timeline" src="../timelines/dp.html" title="Interactive timeline: DP" loading="lazy"></iframe>'
    """
    source = f"{root}timelines/{strategy}.html"
    name = escape(f"Interactive timeline: {title}")
    return f'<iframe class="timeline" src="{source}" title="{name}" loading="lazy"></iframe>'
