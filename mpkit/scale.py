"""Scaling: how much faster more ranks are.

    throughput   samples a second
    speed-up     throughput over that of the fewest ranks
    efficiency   speed-up over how many times as many ranks there are; 1 is ideal

Strong scaling keeps the batch, so each rank has less and less to do (Amdahl 1967); weak scaling keeps what each rank
does, so the batch grows (Gustafson 1988).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from mpkit.cluster import Cluster
from mpkit.devices import Hardware
from mpkit.lent import lent_of_any_size
from mpkit.plan import Plan
from mpkit.shown import data_frame
from mpkit.tracebacks import public

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from mpkit.run import Run
    from mpkit.timeline import Timeline

__all__ = ["Scaling", "ScalingRow", "scaling"]


@dataclass(frozen=True)
class ScalingRow:
    """One run.

    Attributes:
        plan: it followed.
        ranks: how many.
        batch: samples a step.
        step_time: seconds, the median of all steps but the first, on the clock.
        speed_up: throughput over that of the fewest ranks.
        efficiency: speed_up over how many times as many ranks.
        exposed: seconds a step of communication that no compute hides, on the rank with most of it.
        wall_time: seconds a step by the wall clock, where each rank had a device of its own; else None.
    """

    plan: Plan
    ranks: int
    batch: int
    step_time: float
    speed_up: float
    efficiency: float
    exposed: float
    wall_time: float | None

    @property
    def throughput(self) -> float:
        """Samples a second, on the clock."""
        return self.batch / self.step_time

    @property
    def wall_throughput(self) -> float | None:
        """Samples a second by the wall clock, where that says anything."""
        return None if self.wall_time is None else self.batch / self.wall_time


@dataclass(frozen=True)
class Scaling:
    """What `scaling` found: prints as a table, and shows itself as a chart in a notebook.

    Attributes:
        rows: a run each, in the order asked for.
        weak: weak scaling, or strong.
        hardware: on which the runs were put on the virtual clock; "" for the machine they ran on.
    """

    rows: tuple[ScalingRow, ...]
    weak: bool
    hardware: str

    @property
    def kind(self) -> str:
        """What stays the same, in words."""
        if self.weak:
            return f"weak scaling: {self.rows[0].batch // self.rows[0].ranks} samples a rank"
        return f"strong scaling: {self.rows[0].batch} samples a batch"

    def to_dataframe(self) -> pd.DataFrame:
        """A row a run; columns as the attributes of `ScalingRow`, with `strategy`, throughput and wall_throughput."""
        columns = ("ranks", "batch", "step_time", "throughput", "speed_up", "efficiency", "exposed",
                   "wall_time", "wall_throughput")  # fmt: skip
        return data_frame(
            [
                {"strategy": strategy(row.plan), **{name: getattr(row, name) for name in columns}}
                for row in self.rows
            ]
        )

    def figure(self) -> Any:
        """The chart, a plotly Figure: throughput by ranks, a line a strategy, and the ideal one.

        Raises:
            ImportError: plotly is not installed.
        """
        from mpkit.views.scaling import scaling_figure

        return scaling_figure(self)

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

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        try:
            bundle: dict[str, Any] = self.figure()._repr_mimebundle_(include, exclude)
        except ImportError:
            bundle = {}
        return {**bundle, "text/plain": str(self)}


def strategy(plan: Plan) -> str:
    """A plan's strategy in a word.

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
    """Train on more and more ranks, and say how much faster that is.

    The runs are real; the times are those of the virtual clock, on which each rank has a device of its own. So
    eight ranks can be compared on two cores. Where each rank really has a GPU, the wall clock's are beside them.

    >>> import torch, mpkit as mk
    >>> from mpkit.data import spirals
    >>> from mpkit.models import MLP
    >>> found = mk.scaling(MLP(2, 3), spirals(32, 4), [1, 2], loss=torch.nn.functional.cross_entropy,
    ...                    optimizer=lambda params: torch.optim.SGD(params, lr=0.1), device="cpu")
    >>> [row.ranks for row in found.rows], found.rows[0].speed_up, found.kind
    ([1, 2], 1.0, 'strong scaling: 32 samples a batch')

    Args:
        model, data, loss, optimizer: as in `Cluster.train`; data as for the fewest ranks.
        plans: numbers of ranks (1 is serial training, more is DDP), or Plans of any strategies.
        steps: of each run; the first is not counted, since ranks set themselves up in it.
        weak: keep the samples a rank, so that the batch grows with the ranks; else (strong) keep the batch.
        hardware: replay the runs on this machine; None: on the one they run on.
        device: as in `Cluster`.
        clusters: clusters(ranks) gives one to use; None: of a helper process of its own, closed afterwards.

    Raises:
        ValueError: no plans, fewer than 2 steps, or what `Cluster.train` raises.
    """
    asked = [_plan_of(plan) for plan in plans]
    if not asked:
        raise ValueError("scaling(plans=[]): give numbers of ranks, such as [1, 2, 4, 8], or Plans")
    if steps < 2:
        raise ValueError(f"scaling(steps={steps}): the first step is not counted, so 2 or more; steps=4, say")
    least = min(plan.ranks for plan in asked)
    found = []
    with lent_of_any_size(clusters, device) as sized:
        for plan in asked:
            grown = _grown(data, plan.ranks, least, steps) if weak else data
            cluster = sized(plan.ranks)
            run = cluster.train(
                model, grown, plan, loss=loss, optimizer=optimizer, steps=steps, show=False
            ).wait()
            found.append(_figures(run, cluster, hardware))
    samples = [batch / step_time for batch, step_time, *_ in found]
    first = next(i for i, plan in enumerate(asked) if plan.ranks == least)
    rows = []
    for plan, (batch, step_time, exposed, wall), throughput in zip(asked, found, samples, strict=True):
        speed_up = throughput / samples[first]
        efficiency = speed_up / (plan.ranks / least)
        rows.append(ScalingRow(plan, plan.ranks, batch, step_time, speed_up, efficiency, exposed, wall))
    name = hardware.name if isinstance(hardware, Hardware) else hardware or ""
    return Scaling(tuple(rows), weak, name)


def _plan_of(plan: Any) -> Plan:
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, bool) or not isinstance(plan, int) or plan < 1:
        raise ValueError(
            f"scaling(plans=[..., {plan!r}, ...]): each is a number of ranks, 1 or more, or a Plan, such as "
            "[1, 2, 4, 8] or [mk.Plan.serial(), mk.Plan.zero(3, 4)]"
        )
    return Plan.serial() if plan == 1 else Plan.ddp(plan)


def _grown(data: Any, ranks: int, least: int, steps: int) -> list[Any]:
    """The data with batches as many times as large as there are more ranks: the same samples again."""
    from mpkit.data_stream import Stream
    from mpkit.parallel.microbatch import map_tensors
    from mpkit.prepare.batches import take_batches

    if ranks % least:
        raise ValueError(
            f"weak scaling from {least} to {ranks} ranks: the batch would have to be {ranks / least:g} times as "
            f"large, which is no whole number of batches. Take multiples of {least}."
        )
    times = ranks // least
    batches = take_batches(data, steps)
    if isinstance(batches, Stream):
        raise ValueError(
            "weak scaling makes larger batches of the same samples, and these data come one after the other, "
            "once: give a list of batches, such as list(itertools.islice(data, 4))"
        )
    return [
        tuple(map_tensors(lambda t: t.repeat(times, *[1] * (t.dim() - 1)), value) for value in batches[i])
        for i in range(min(steps, len(batches)))
    ]


def _figures(
    run: Run, cluster: Cluster, hardware: Hardware | str | None
) -> tuple[int, float, float, float | None]:
    """Samples a step; seconds a step, seconds of exposed communication, seconds a step by the wall clock."""
    timeline = run.timeline(hardware, clock="virtual")
    own_devices = cluster.device == "cuda" and cluster.ranks <= cluster.devices
    wall = _median(run.timeline(clock="measured"), "step_time") if own_devices else None
    exposed = median(max(timeline.step(i).exposed_comm) for i in timeline.steps[1:])
    return int(timeline.meta["batch_size"]), _median(timeline, "step_time"), exposed, wall


def _median(timeline: Timeline, figure: str) -> float:
    """Of all steps but the first."""
    return float(median(getattr(timeline.step(i), figure) for i in timeline.steps[1:]))
