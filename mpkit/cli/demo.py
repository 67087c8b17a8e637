"""The main demonstration: train one model on one batch of text with each strategy in turn, and compare the costs.

serial     one process: the losses and the time that the others are compared with
each       the strategy on all ranks (`demo.toml`), its typical step drawn as text
compare    a table
keep       the interactive timelines in one HTML file
"""

import time
import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mpkit.common.disk import write_whole
from mpkit.common.units import bytes_text, memory_text, percent, seconds
from mpkit.launch.session.cluster import Cluster
from mpkit.launch.session.run import Run
from mpkit.plan.plan import Plan
from mpkit.strategies.data.datasets import text_batches
from mpkit.strategies.models import GPT, next_token_loss
from mpkit.timeline.notes import proof_notes
from mpkit.timeline.timeline import Timeline
from mpkit.trace import CATEGORIES
from mpkit.trace.proof import Proof
from mpkit.views.drawing.lanes import FOLDED
from mpkit.views.page.html import html
from mpkit.views.timeline.text import text

EQUAL = "equal to serial"

WIDEST = 120
"""The most columns of a picture; a wider one is harder to read, not easier."""

LOOK_FOR = (
    "Each picture has a row per rank, and time goes to the right: blue is forward, orange backward, green the "
    "optimizer, pink what is sent; where a row is hatched, the rank is idle, and the idle share of a step is its "
    "bubble. All strategies reach the same losses: compare what they cost in time, memory and messages."
)
"""What the page tells its readers to look for."""


@cache
def strategies() -> dict[str, dict[str, Any]]:
    """Return the rows of `demo.toml`: serial training, and the strategies by the option's value."""
    return tomllib.loads((files(__package__) / "demo.toml").read_text(encoding="utf-8"))


class DemoStrategy(NamedTuple):
    """A strategy of the demo: its name in the table, its plan, and what there is to be seen in its picture."""

    title: str
    plan: Plan
    seen: str


def find_strategy(name: str, ranks: int, microbatches: int) -> DemoStrategy:
    """Return a strategy on so many ranks, with so many micro-batches if it is a pipeline.

    >>> find_strategy("gpipe", 4, 8)[:2]
    ('GPipe, m=8', Plan(pp=4, schedule='gpipe', microbatches=8))

    Raises:
        ValueError: there is none of this name, or it cannot use this many ranks.
    """
    rows = strategies()
    if name not in rows:
        known = ", ".join(each for each in rows if each != "serial")
        raise ValueError(f"--strategies {name}: there are {known}; for example --strategies naive,gpipe")
    fields = dict(rows[name]["plan"])
    for field_name, value in fields.items():
        if isinstance(value, str) and value.startswith("n/"):
            each = int(value[2:])
            if ranks < 2 * each or ranks % each:
                raise ValueError(
                    f"--ranks {ranks}: this strategy takes two replicas or more, of {each} ranks each: "
                    f"--ranks {2 * each}"
                )
            fields[field_name] = ranks // each
        elif value in ("n", "m"):
            fields[field_name] = {"n": ranks, "m": microbatches}[value]
    return DemoStrategy(rows[name]["title"].format(m=microbatches), Plan(**fields), rows[name]["seen"])


@dataclass
class Outcome:
    """One strategy's entry in the table.

    Attributes:
        timeline: the timeline of the whole run.
        losses: one per step.
        proof: what is known of its equality with plain PyTorch.
        theory: the bubble according to the formula; None for serial training.
        caption: the strategy, and what is to be seen in its picture.
    """

    name: str
    timeline: Timeline
    losses: list[float]
    proof: Proof
    theory: float | None
    caption: str

    @property
    def typical_step(self) -> int:
        """The step with the median bubble; the first is left out, since it allocates memory and loads code."""
        return find_typical_step(self.timeline)

    @property
    def typical(self) -> Timeline:
        """That step, which the table and the page show."""
        return self.timeline.step(self.typical_step)


def find_typical_step(timeline: Timeline) -> int:
    """Return the step with the median bubble, of all but the first."""
    by_bubble = sorted(timeline.steps[1:] or timeline.steps, key=lambda step: timeline.step(step).bubble)
    return by_bubble[len(by_bubble) // 2]


USUAL = "naive,gpipe,ddp,zero3"
"""The strategies of the option's default."""


@dataclass
class Demo:
    """The work of `python -m mpkit demo`; the attributes are the options of the command."""

    ranks: int = 4
    microbatches: int = 8
    layers: int = 8
    width: int = 192
    length: int = 64
    batch: int = 32
    steps: int = 6
    strategies: tuple[str, ...] = tuple(USUAL.split(","))
    device: str = "auto"
    html: str = "mpkit-demo.html"
    seed: int = 0
    plain: bool = False
    console: Console = field(default_factory=Console)

    def run(self) -> list[Outcome]:
        """Run the whole demonstration; returns the entries of the table.

        Raises:
            ValueError: there is no such strategy, or it cannot use this many ranks.
        """
        names = dict.fromkeys(self.strategies)
        chosen = [find_strategy(name, self.ranks, self.microbatches) for name in names]
        serial = find_strategy("serial", 1, 1)
        torch.manual_seed(self.seed)
        model = GPT(layers=self.layers, width=self.width, length=self.length)
        data = text_batches(self.batch, self.length, self.steps, seed=self.seed)
        size = sum(p.numel() for p in model.parameters())
        what = (
            f"trains a GPT of {self.layers} blocks, {size / 1e6:.1f} M parameters, on Python's own documentation: "
            f"{self.steps} steps of {self.batch} x {self.length} bytes."
        )
        self.console.print(f"[bold]mpkit[/bold] {what}", highlight=False)
        with Cluster(self.ranks, self.device) as all_ranks:
            outcomes = [
                self._train(each, all_ranks.resized(1) if each is serial else all_ranks, model, data)
                for each in (serial, *chosen)
            ]
        self.console.print()
        self.console.print(self.table(outcomes))
        # The table has them.
        proofs = {note for outcome in outcomes for note in proof_notes(outcome.timeline.meta)}
        notes = dict.fromkeys(note for each in outcomes for note in each.timeline.notes if note not in proofs)
        for sentence in [*self._explain(outcomes), *notes]:
            self.console.print(f"[dim]{sentence}[/dim]", highlight=False)
        if self.html:
            self._keep(outcomes, f"mpkit {what}")
        return outcomes

    def _train(
        self, strategy: DemoStrategy, cluster: Cluster, model: GPT, data: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> Outcome:  # fmt: skip
        self.console.print()
        name, plan, seen = strategy
        run = cluster.train(
            model, data, plan, loss=next_token_loss, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
            steps=self.steps, seed=self.seed, show=False,
        )  # fmt: skip
        self._follow(run, name)
        theory = float(plan.bubble_in_theory or 0) or None
        return Outcome(name, run.timeline(), run.losses, run.proof, theory, f"{plan.describe()} {seen}")

    def _follow(self, run: Run, name: str) -> None:
        """Show a bar while the run goes on, and its typical step when it is over."""
        with Progress(
            console=self.console, transient=True, disable=self.plain or not self.console.is_terminal
        ) as bar:
            task = bar.add_task(name, total=run.steps)
            while not run.done:
                bar.update(task, completed=run.first_step + len(run.losses))
                time.sleep(0.1)
        run.wait()
        self.console.print(
            f"[bold]{name}[/bold]: loss {run.losses[-1]:.4f} after {run.steps} steps", highlight=False
        )
        timeline, width = run.timeline(), max(min(self.console.width, WIDEST), 40)
        drawn = text(
            timeline, width, step=find_typical_step(timeline), fold=run.plan.ranks > FOLDED, notes=False
        )
        self.console.print(drawn, highlight=False, soft_wrap=True, markup=False)

    def table(self, outcomes: list[Outcome]) -> Table:
        """Return a table of what each strategy cost, with a column per strategy."""
        serial = outcomes[0]
        table = Table(
            title="What it cost (a typical step)", title_justify="left", box=SIMPLE_HEAD, pad_edge=False
        )
        table.add_column("", style="dim", no_wrap=True)
        for outcome in outcomes:
            table.add_column(outcome.name, justify="right")

        each = [outcome.typical for outcome in outcomes]
        table.add_row("bubble measured", *[percent(t.bubble) for t in each])
        table.add_row("bubble in theory", *[percent(o.theory) if o.theory else "-" for o in outcomes])
        table.add_row("step time", *[seconds(t.step_time) for t in each])
        table.add_row("speed-up", *[f"{serial.typical.step_time / t.step_time:.2f} x" for t in each])
        table.add_section()
        fullest = [_fullest(t) for t in each]
        most = max(held["total"] for held in fullest)
        for category, label in {"total": "peak memory", **{each: f"  {each}" for each in CATEGORIES}}.items():
            table.add_row(label, *[memory_text(held.get(category, 0), most) for held in fullest])
        table.add_row("bytes sent", *[bytes_text(_sent_bytes(t)) for t in each])
        table.add_section()
        table.add_row("last loss", *[f"{o.losses[-1]:.4f}" for o in outcomes])
        table.add_row(EQUAL, *[_equal(o) for o in outcomes])
        return table

    def _explain(self, outcomes: list[Outcome]) -> list[str]:
        """Say what the figures are, and how they were measured."""
        how = "Shown is the step with the median bubble. Memory is that of the rank that holds most; m: micro-batches."
        if outcomes[-1].timeline.clock == "measured":
            return [how, "Times are the wall clock's, from CUDA events."]
        return [
            how,
            "Times are on the virtual clock: each rank has a core of its own, as a GPU would, although here all share "
            "this machine's. An op takes the CPU time that it really used.",
        ]

    def _keep(self, outcomes: list[Outcome], what: str) -> None:
        facts = {
            o.name: {
                "bubble in theory": "-" if not o.theory else percent(o.theory),
                "last loss": f"{o.losses[-1]:.4f}",
                EQUAL: _equal(o),
            }
            for o in outcomes
        }
        path = Path(self.html)
        page = html(
            {o.name: o.timeline for o in outcomes},
            title="One model, trained in several ways",
            facts=facts,
            intro=f"{what} {LOOK_FOR}",
            below=" ".join(self._explain(outcomes)),
            captions={o.name: o.caption for o in outcomes},
            steps={o.name: o.typical_step for o in outcomes},
            base=outcomes[0].name,
            try_it=(self.ranks, self.microbatches),
        )
        write_whole(path, page.encode())
        self.console.print(
            f"Interactive timelines: [bold]{path.resolve()}[/bold] (open it in a browser)", highlight=False
        )


def _fullest(timeline: Timeline) -> dict[str, int]:
    """Return what the rank that holds the most memory holds at its peak: in all, and by category."""
    held = max(timeline.memory, key=lambda held: sum(held.values()))
    return {"total": sum(held.values()), **held}


def _sent_bytes(timeline: Timeline) -> int:
    """Sum the payload bytes of all messages and collectives, counting each message once."""
    return sum(count for rank in timeline.comm_bytes for kind, count in rank.items() if kind != "recv")


def _equal(outcome: Outcome) -> str:
    """Return in how many steps the run has proved itself equal to serial training (docs/proof.md)."""
    proof = outcome.proof
    return f"{len(proof.steps)} steps" if proof.status == "equal" else proof.status
