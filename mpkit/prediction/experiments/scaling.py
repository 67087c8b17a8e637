"""Scaling: how much faster training becomes on more ranks.

    throughput   samples per second
    speed-up     throughput divided by that of the fewest ranks
    efficiency   speed-up divided by the ratio of the numbers of ranks; 1 is ideal

Strong scaling keeps the batch, so each rank has less and less to do (Amdahl 1967); weak scaling keeps the work per
rank, so the batch grows (Gustafson 1988).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from mpkit.common.display import ChartedResult
from mpkit.common.tracebacks import public
from mpkit.devices.hardware import Hardware
from mpkit.launch.session.cluster import Cluster, borrow_clusters
from mpkit.plan.plan import Plan

if TYPE_CHECKING:
    import torch

    from mpkit.timeline.timeline import Timeline


@dataclass(frozen=True)
class ScalingRow:
    """One run.

    Attributes:
        plan: the plan it followed.
        ranks: the number of ranks.
        batch: samples per step.
        step_time: seconds, the median of all steps but the first, on the clock.
        speed_up: throughput divided by that of the fewest ranks.
        efficiency: speed_up divided by the ratio of the numbers of ranks.
        exposed: seconds per step of communication that no compute hides, on the rank with most of it.
        wall_time: seconds per step by the wall clock if each rank had a device of its own; else None.
        answer: the run's timeline: memory, bubble, causes.
    """

    plan: Plan
    ranks: int
    batch: int
    step_time: float
    speed_up: float
    efficiency: float
    exposed: float
    wall_time: float | None
    answer: Timeline = field(repr=False, compare=False)

    @property
    def throughput(self) -> float:
        """Samples per second, on the clock."""
        return self.batch / self.step_time

    @property
    def wall_throughput(self) -> float | None:
        """Samples per second by the wall clock; None if the ranks shared devices."""
        return None if self.wall_time is None else self.batch / self.wall_time


@dataclass(frozen=True)
class Scaling(ChartedResult):
    """The result of `scaling`: prints as a table, and shows itself as a chart in a notebook.

    The chart (`figure`) shows throughput by ranks: one line per strategy, and the ideal line.

    Attributes:
        rows: one per run, in the order of the plans.
        weak: whether this is weak scaling; else strong.
        hardware: the machine on whose virtual clock the runs were put; "" for the machine they ran on.
    """

    rows: tuple[ScalingRow, ...]
    weak: bool
    hardware: str

    @property
    def kind(self) -> str:
        """What stays the same, in words."""
        if self.weak:
            return f"weak scaling: {self.rows[0].batch // self.rows[0].ranks} samples per rank"
        return f"strong scaling: {self.rows[0].batch} samples per batch"

    def __str__(self) -> str:
        where = f"on {self.hardware}" if self.hardware else "each rank on a device of its own"
        lines = [f"{self.kind}; virtual clock, {where}", ""]
        walls = any(row.wall_time is not None for row in self.rows)
        head = f"{'':10} ranks  batch     a step  samples/s  speed-up  efficiency  exposed"
        lines.append(head + ("  samples/s by the wall clock" if walls else ""))
        for row in self.rows:
            line = (
                f"{strategy(row.plan):10} {row.ranks:5} {row.batch:6} {row.step_time * 1e3:7.1f} ms "
                f"{row.throughput:10.1f} {row.speed_up:9.2f} {row.efficiency:10.0%} {row.exposed * 1e3:6.1f} ms"
            )
            lines.append(line + (f" {row.wall_throughput:10.1f}" if row.wall_throughput is not None else ""))
        return "\n".join(lines)


def strategy(plan: Plan) -> str:
    """Name a plan's strategy in a word.

    >>> [strategy(plan) for plan in (Plan.serial(), Plan.ddp(2), Plan.dp(2), Plan.zero(3, 2), Plan.gpipe(2, 2))]
    ['serial', 'DDP', 'DP', 'ZeRO-3', 'gpipe']
    """
    if plan.zero:
        return f"ZeRO-{plan.zero}"
    if plan.dp > 1:
        return plan.data_parallel.upper()
    if plan.ranks == 1:
        return "serial"
    return plan.schedule if isinstance(plan.schedule, str) else plan.schedule.name


@public
def scaling(
    model: torch.nn.Module,
    data: Any,
    plans: Sequence[int | Plan] = (1, 2, 4, 8),
    *,
    loss: Callable[[Any, Any], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: int = 4,
    weak: bool = False,
    hardware: Hardware | str | None = None,
    device: str = "auto",
    clusters: Callable[[int], Cluster] | None = None,
) -> Scaling:
    """Train on more and more ranks, and report how much faster that is.

    The runs are real; the times are those of the virtual clock, on which each rank has a device of its own. Eight
    ranks can therefore be compared on two cores. Where each rank really has a GPU, the wall clock's times are added.

    >>> import torch, mpkit as mk
    >>> from mpkit.strategies.data.datasets import spirals
    >>> from mpkit.models import MLP
    >>> found = mk.scaling(MLP(2, 3), spirals(32, 4), [1, 2], loss=torch.nn.functional.cross_entropy,
    ...                    optimizer=lambda params: torch.optim.SGD(params, lr=0.1), device="cpu")
    >>> [row.ranks for row in found.rows], found.rows[0].speed_up, found.kind
    ([1, 2], 1.0, 'strong scaling: 32 samples per batch')

    Args:
        model, data, loss, optimizer: as in `Cluster.train`; `data` is for the fewest ranks.
        plans: numbers of ranks (1 is serial training, more is DDP), or Plans of any strategies.
        steps: the steps of each run; the first is not counted, since it includes setting up.
        weak: keep the samples per rank, so that the batch grows with the ranks; else (strong) keep the batch.
        hardware: the machine to replay the runs on; None: the one they run on.
        device: as in `Cluster`.
        clusters: clusters(ranks) returns a cluster to use; None: start a helper process, and close it afterwards.

    Raises:
        ValueError: there are no plans or fewer than 2 steps, or `Cluster.train` raises it.
    """
    asked = [_plan_of(plan) for plan in plans]
    if not asked:
        raise ValueError("scaling(plans=[]): give numbers of ranks, such as [1, 2, 4, 8], or Plans")
    if steps < 2:
        raise ValueError(f"scaling(steps={steps}): the first step is not counted, so 2 or more; steps=4, say")
    least = min(plan.ranks for plan in asked)
    runs: list[tuple[Plan, Timeline, float | None]] = []
    with borrow_clusters(clusters, device) as sized:
        for plan in asked:
            grown = _grow_batches(data, plan.ranks, least, steps) if weak else data
            cluster = sized(plan.ranks)
            run = cluster.train(
                model, grown, plan, loss=loss, optimizer=optimizer, steps=steps, show=False
            ).wait()
            own_devices = cluster.device == "cuda" and cluster.ranks <= cluster.devices
            wall = _step_time(run.timeline(clock="measured")) if own_devices else None
            runs.append((plan, run.timeline(hardware, clock="virtual"), wall))
    name = hardware.name if isinstance(hardware, Hardware) else hardware or ""
    return Scaling(tuple(_rows(runs, least)), weak, name)


def _rows(runs: Sequence[tuple[Plan, Timeline, float | None]], least: int) -> Iterator[ScalingRow]:
    """Yield a row per run, with its speed-up over the first one with the fewest ranks."""

    def throughput(timeline: Timeline) -> float:
        return int(timeline.meta["batch_size"]) / _step_time(timeline)

    base = next(throughput(timeline) for plan, timeline, _ in runs if plan.ranks == least)
    for plan, timeline, wall in runs:
        speed_up = throughput(timeline) / base
        exposed = median(max(timeline.step(i).exposed_comm) for i in timeline.steps[1:])
        yield ScalingRow(
            plan, plan.ranks, int(timeline.meta["batch_size"]), _step_time(timeline), speed_up,
            speed_up / (plan.ranks / least), exposed, wall, timeline,
        )  # fmt: skip


def _plan_of(plan: Any) -> Plan:
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, bool) or not isinstance(plan, int) or plan < 1:
        raise ValueError(
            f"scaling(plans=[..., {plan!r}, ...]): each is a number of ranks, 1 or more, or a Plan, such as "
            "[1, 2, 4, 8] or [mk.Plan.serial(), mk.Plan.zero(3, 4)]"
        )
    return Plan.serial() if plan == 1 else Plan.ddp(plan)


def _grow_batches(data: Any, ranks: int, least: int, steps: int) -> list[Any]:
    """Enlarge the batches by the ratio of the numbers of ranks, by repeating the same samples."""
    from mpkit.strategies.data.microbatch import map_tensors
    from mpkit.strategies.prepare.batches import take_batches

    if ranks % least:
        raise ValueError(
            f"weak scaling from {least} to {ranks} ranks: the batch would have to be {ranks / least:g} times as "
            f"large, which is no whole number of batches. Take multiples of {least}."
        )
    times = ranks // least
    batches = take_batches(data, steps)
    return [
        tuple(map_tensors(lambda t: t.repeat(times, *[1] * (t.dim() - 1)), value) for value in batches[i])
        for i in range(min(steps, len(batches)))
    ]


def _step_time(timeline: Timeline) -> float:
    """Return the median of all steps but the first, in seconds."""
    return float(median(timeline.step(i).step_time for i in timeline.steps[1:]))
