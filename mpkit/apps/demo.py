"""The main demonstration: train one model on one batch of text with each strategy in turn, and compare the costs.

serial     one process: the losses and the time that the others are compared with
each       the strategy on all ranks, drawn while it runs
compare    a table
keep       the interactive timelines in one HTML file
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from mpkit.api.cluster import Cluster
from mpkit.data.datasets import text_batches
from mpkit.models import GPT, next_token_loss
from mpkit.plan.plan import Plan
from mpkit.support.disk import write_whole
from mpkit.support.units import bytes_text, percent, seconds
from mpkit.timeline.timeline import Timeline
from mpkit.trace import CATEGORIES
from mpkit.views.timeline.terminal import watch

__all__ = ["Demo", "Outcome"]

STRATEGIES: dict[str, Callable[[int, int], tuple[str, Plan]]] = {
    "naive": lambda n, m: ("naive MP", Plan.naive_mp(n)),
    "gpipe": lambda n, m: (f"GPipe, m={m}", Plan.gpipe(n, m)),
    "gpipe-recompute": lambda n, m: ("GPipe, recomputing", Plan.gpipe(n, m, recompute="full")),
    "1f1b": lambda n, m: (f"1F1B, m={m}", Plan.pipeline("1f1b", n, m)),
    "zb-h1": lambda n, m: (f"ZB-H1, m={m}", Plan.pipeline("zb_h1", n, m)),
    "dp": lambda n, m: ("DP", Plan(dp=n, data_parallel="dp")),
    "ddp": lambda n, m: ("DDP", Plan.ddp(n)),
    "zero1": lambda n, m: ("ZeRO-1", Plan(dp=n, zero=1)),
    "zero2": lambda n, m: ("ZeRO-2", Plan(dp=n, zero=2)),
    "zero3": lambda n, m: ("ZeRO-3", Plan(dp=n, zero=3)),
    "tp": lambda n, m: ("TP", Plan(tp=n)),
    "2d": lambda n, m: ("ZeRO-3 x TP", Plan(dp=_replicas(n, 2), tp=2, zero=3)),
    "3d": lambda n, m: (
        "PP x DP x TP, ZeRO-1",
        Plan(pp=2, dp=_replicas(n, 4), tp=2, zero=1, schedule="1f1b", microbatches=m),
    ),
}
"""By the option's value: a function of ranks and micro-batches that returns the name in the table, and the plan."""


def _replicas(ranks: int, each: int) -> int:
    """Return the number of replicas if each takes `each` ranks; there must be two or more."""
    if ranks < 2 * each or ranks % each:
        raise ValueError(
            f"--ranks {ranks}: this strategy takes two replicas or more, of {each} ranks each: --ranks {2 * each}"
        )
    return ranks // each


@dataclass
class Outcome:
    """One strategy's entry in the table.

    Attributes:
        timeline: the timeline of the whole run.
        losses: one per step.
        theory: the bubble according to the formula; None for serial training.
    """

    name: str
    timeline: Timeline
    losses: list[float]
    theory: float | None

    @property
    def typical(self) -> Timeline:
        """The step with the median bubble; the first is left out, since it allocates memory and loads code."""
        steps = self.timeline.steps[1:] or self.timeline.steps
        by_bubble = sorted(steps, key=self.timeline.bubble_of)
        return self.timeline.step(by_bubble[len(by_bubble) // 2])


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
    strategies: tuple[str, ...] = ("naive", "gpipe", "ddp", "zero3")
    device: str = "auto"
    html: str = "mpkit-demo.html"
    seed: int = 0
    plain: bool = False
    console: Console = field(default_factory=Console)

    def plans(self) -> dict[str, Plan]:
        """Return the Plans to run, by the name in the table.

        Raises:
            ValueError: there is no such strategy, or it cannot use this many ranks.
        """
        plans = {}
        for name in self.strategies:
            if name not in STRATEGIES:
                raise ValueError(
                    f"--strategies {name}: there are {', '.join(STRATEGIES)}; for example --strategies naive,gpipe"
                )
            title, plan = STRATEGIES[name](self.ranks, self.microbatches)
            plans[title] = plan
        return plans

    def run(self) -> list[Outcome]:
        """Run the whole demonstration; returns the entries of the table."""
        plans = self.plans()
        torch.manual_seed(self.seed)
        model = GPT(layers=self.layers, width=self.width, length=self.length)
        data = text_batches(self.batch, self.length, self.steps, seed=self.seed)
        size = sum(p.numel() for p in model.parameters())
        self.console.print(
            f"[bold]mpkit[/bold] trains a GPT of {self.layers} blocks, {size / 1e6:.1f} M parameters, on Python's own "
            f"documentation: {self.steps} steps of {self.batch} x {self.length} bytes.",
            highlight=False,
        )
        with Cluster(self.ranks, self.device) as all_ranks:
            outcomes = [self._train("serial", Plan.serial(), all_ranks.resized(1), model, data)]
            for name, plan in plans.items():
                outcomes.append(self._train(name, plan, all_ranks, model, data))
        self.console.print()
        self.console.print(self.table(outcomes))
        for sentence in self._explain(outcomes):
            self.console.print(f"[dim]{sentence}[/dim]", highlight=False)
        if self.html:
            self._keep(outcomes)
        return outcomes

    def _train(
        self,
        name: str,
        plan: Plan,
        cluster: Cluster,
        model: GPT,
        data: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> Outcome:
        self.console.print()
        run = cluster.train(
            model,
            data,
            plan,
            loss=next_token_loss,
            optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
            steps=self.steps,
            seed=self.seed,
            show=False,
        )
        watch(run, title=name, console=self.console, live=not self.plain)
        theory = plan.bubble_in_theory
        return Outcome(name, run.timeline(), run.losses, None if theory is None else float(theory))

    def table(self, outcomes: list[Outcome]) -> Table:
        """Return a table of what each strategy cost, with a column per strategy."""
        serial = outcomes[0]
        table = Table(title="What it cost (a typical step)", title_justify="left", title_style="bold")
        table.add_column("", style="dim")
        for outcome in outcomes:
            table.add_column(outcome.name, justify="right")

        def row(label: str, values: list[str]) -> None:
            table.add_row(label, *values)

        each = [outcome.typical for outcome in outcomes]
        row("bubble measured", ["-" if t.world_size == 1 else percent(t.bubble) for t in each])
        row(
            "bubble in theory",
            ["-" if o.theory is None or not o.theory else percent(o.theory) for o in outcomes],
        )
        row("step time", [seconds(t.step_time) for t in each])
        row("speed-up", [f"{serial.typical.step_time / t.step_time:.2f} x" for t in each])
        table.add_section()
        row("peak memory", [bytes_text(_fullest(t)["total"]) for t in each])
        for category in CATEGORIES:
            row(f"  {category}", [bytes_text(_fullest(t).get(category, 0)) for t in each])
        row("bytes sent", [bytes_text(_sent(t)) for t in each])
        table.add_section()
        row("last loss", [f"{o.losses[-1]:.4f}" for o in outcomes])
        row("equal to serial", ["-", *("yes" if _equal(o, serial) else "NO" for o in outcomes[1:])])
        return table

    def _explain(self, outcomes: list[Outcome]) -> list[str]:
        """Say what the figures are: what all timelines note, once, and how the table was made."""
        notes = list(dict.fromkeys(note for outcome in outcomes for note in outcome.timeline.notes))
        how = "Shown is the step with the median bubble. Memory is that of the rank that holds most; m: micro-batches."
        if outcomes[-1].timeline.clock == "measured":
            return [how, "Times are the wall clock's, from CUDA events.", *notes]
        return [
            how,
            "Times are on the virtual clock: each rank has a core of its own, as a GPU would, although here all share "
            "this machine's. An op takes the CPU time that it really used.",
            *notes,
        ]

    def _keep(self, outcomes: list[Outcome]) -> None:
        from mpkit.views.timeline.html import html

        serial, *parallel = outcomes
        shown = parallel or outcomes
        facts = {
            o.name: {
                "bubble in theory": "-" if not o.theory else percent(o.theory),
                "losses equal to serial": "yes" if _equal(o, serial) else "no",
            }
            for o in shown
        }
        path = Path(self.html)
        page = html({o.name: o.timeline for o in shown}, title="mpkit demo", facts=facts)
        write_whole(path, page.encode())
        self.console.print(
            f"Interactive timelines: [bold]{path.resolve()}[/bold] (open it in a browser)", highlight=False
        )


def _fullest(timeline: Timeline) -> dict[str, int]:
    """Return the peak of the rank that holds the most memory."""
    return max(timeline.peak_memory, key=lambda held: held["total"])


def _sent(timeline: Timeline) -> int:
    """Sum the payload bytes of all messages and collectives, counting each message once."""
    return sum(count for rank in timeline.comm_bytes for kind, count in rank.items() if kind != "recv")


def _equal(outcome: Outcome, serial: Outcome) -> bool:
    """Return whether the losses differ by no more than another order of fp32 summation explains."""
    return len(outcome.losses) == len(serial.losses) and all(
        math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6)
        for a, b in zip(outcome.losses, serial.losses, strict=True)
    )
