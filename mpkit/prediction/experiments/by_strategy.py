"""Experiments by strategy: the same model trained with several plans, for speed on more ranks and for memory.

Scaling says how much faster training becomes on more ranks:

    throughput   samples per second
    speed-up     throughput divided by that of the fewest ranks
    efficiency   speed-up divided by the ratio of the numbers of ranks; 1 is ideal

Strong scaling keeps the batch, so each rank has less and less to do (Amdahl 1967); weak scaling keeps the work per
rank, so the batch grows (Gustafson 1988).

Memory is what each rank holds, compared with the formulas. Of psi parameters, trained by n ranks with an optimizer that
keeps s numbers for each (Adam: 2), a rank holds, in bytes:

                parameters   gradients   optimizer           in 16 bits: b = 2, and masters, so w (s + 1) with w = 4
    serial, DDP   b psi        b psi       w s psi           else b = w = the model's own, 4 in fp32
    ZeRO-1        b psi        b psi       w s psi / n
    ZeRO-2        b psi        b psi / n   w s psi / n
    ZeRO-3        b psi / n    b psi / n   w s psi / n
    DP            b psi        b psi       w s psi on rank 0, none on the others

States that are offloaded to the host do not count. The formulas ignore padding, which makes all shards equally large.
Activations are in no formula; they are measured.

Source: Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC
2020, figure 1 and section 3.1.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from mpkit.common.display import ChartedResult
from mpkit.common.tracebacks import public
from mpkit.devices.hardware import Hardware
from mpkit.launch.session.cluster import Cluster, borrow_clusters
from mpkit.plan.plan import Plan
from mpkit.prediction.dry_run import trace_fake
from mpkit.strategies.data.microbatch import map_tensors
from mpkit.strategies.prepare.batches import take_batches
from mpkit.timeline.timeline import Timeline
from mpkit.trace import CATEGORIES

# ---- scaling


@dataclass(frozen=True)
class ScalingRow:
    """One run."""

    plan: Plan
    ranks: int
    batch: int  # samples per step
    step_time: float  # seconds, the median of all steps but the first, on the clock
    speed_up: float  # throughput divided by that of the fewest ranks
    efficiency: float  # speed_up divided by the ratio of the numbers of ranks
    exposed: float  # seconds per step of communication that no compute hides, on the rank with most of it
    wall_time: float | None  # seconds per step by the wall clock if each rank had a device of its own
    answer: Timeline = field(repr=False, compare=False)  # of the run: memory, bubble, causes

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
    """

    rows: tuple[ScalingRow, ...]  # one per run, in the order of the plans
    weak: bool  # whether this is weak scaling; else strong
    hardware: str  # the machine on whose virtual clock the runs were put; "" for the machine they ran on

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
    model: nn.Module, data: Any, plans: Sequence[int | Plan] = (1, 2, 4, 8), *,
    loss: Callable[[Any, Any], torch.Tensor], optimizer: Callable[[Any], torch.optim.Optimizer], steps: int = 4,
    weak: bool = False, hardware: Hardware | str | None = None, device: str = "auto",
    clusters: Callable[[int], Cluster] | None = None,
) -> Scaling:  # fmt: skip
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
    how: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "steps": steps}
    with borrow_clusters(clusters, device) as sized:
        for plan in asked:
            grown = _grow_batches(data, plan.ranks, least, steps) if weak else data
            cluster = sized(plan.ranks)
            run = cluster.train(model, grown, plan, show=False, **how).wait()
            own_devices = cluster.device == "cuda" and cluster.ranks <= cluster.devices
            wall = _step_time(run.timeline(clock="measured")) if own_devices else None
            runs.append((plan, run.timeline(hardware, clock="virtual"), wall))
    name = hardware.name if isinstance(hardware, Hardware) else hardware or ""
    return Scaling(tuple(_scaling_rows(runs, least)), weak, name)


def _scaling_rows(runs: Sequence[tuple[Plan, Timeline, float | None]], least: int) -> Iterator[ScalingRow]:
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


# ---- memory


def formula(plan: Plan, psi: int, states: float = 2, rank: int = 0, itemsize: int = 4) -> dict[str, float]:
    """Compute the bytes of params, grads and optimizer that a rank holds, as in the table above.

    `psi` counts parameters, `states` is s and `itemsize` is b.
    """
    n = plan.shards  # the ranks of a sequence hold the same parameters, and shard them too
    narrow = plan.precision != "full"
    b, kept = itemsize, (4 * (states + 1) if narrow else itemsize * states)
    optimizer = kept * psi / (n if plan.zero >= 1 else 1)
    if plan.offload != "none" or (plan.data_parallel == "dp" and n > 1 and rank > 0):
        optimizer = 0.0
    params = 0.0 if plan.offload == "params" else b * psi / (n if plan.zero == 3 else 1)
    return {"params": params, "grads": b * psi / (n if plan.zero >= 2 else 1), "optimizer": optimizer}


class MemoryRow(NamedTuple):
    """One rank under one strategy."""

    strategy: str
    rank: int
    held: Mapping[str, int]  # bytes when the rank holds most, by category
    states: int  # the most bytes of params, grads and optimizer in a step, each at its own peak
    formula: Mapping[str, float]  # their bytes by the formulas


@dataclass(frozen=True)
class MemoryByStrategy(ChartedResult):
    """What each rank holds by strategy: prints as a table, shows itself as a chart in a notebook.

    The chart (`figure`) stacks what each rank holds at its peak, with the formula as a line across the bar.
    """

    rows: tuple[MemoryRow, ...]  # one per rank, strategy by strategy
    how: str  # where the figures come from, in words
    answers: Mapping[str, Timeline] = field(repr=False, compare=False)  # by strategy's name

    def __str__(self) -> str:
        lines = [f"MB per rank when it holds most, {self.how}; states: each at its own peak", ""]
        head = "".join(f"{category:>12}" for category in CATEGORIES)
        lines.append(f"{'':10} rank{head}   states by formula")
        for row in self.rows:
            held = "".join(f"{row.held[category] / 1e6:12.3f}" for category in CATEGORIES)
            lines.append(
                f"{row.strategy:10} {row.rank:4}{held} {row.states / 1e6:8.3f} {sum(row.formula.values()) / 1e6:10.3f}"
            )
        return "\n".join(lines)


@public
def memory_by_strategy(
    model: nn.Module | Callable[[], nn.Module], data: Any, plans: int | Sequence[Plan] | Mapping[str, Plan] = 4, *,
    loss: Callable[[Any, Any], torch.Tensor], optimizer: Callable[[Any], torch.optim.Optimizer], steps: int = 2,
    clusters: Callable[[int], Cluster] | None = None,
) -> MemoryByStrategy:  # fmt: skip
    """Train the same model with several strategies, and report what each rank held.

    >>> import torch, mpkit as mk
    >>> batch = torch.empty(8, 1024, device="meta"), torch.empty(8, 1024, device="meta")
    >>> found = mk.memory_by_strategy(
    ...     lambda: torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False)), batch,
    ...     {"DDP": mk.Plan.ddp(4), "ZeRO-3": mk.Plan.zero(3, 4)},
    ...     loss=torch.nn.functional.mse_loss, optimizer=torch.optim.AdamW)
    >>> [row.states // 2**20 for row in found.rows if row.rank == 0]  # MiB: 16 psi, and 16 psi / 4
    [16, 4]

    Args:
        model: a module, which real ranks train; or a function that makes one, of whatever size, which is run on
            tensors without content (`mk.trace_fake`).
        data: as in `Cluster.train`; for a function, a batch (inputs, targets) as in `mk.trace_fake`.
        plans: the plans to compare, with or without names; a number n of ranks stands for DDP and ZeRO-1, 2, 3.
        loss, optimizer, steps: as in `Cluster.train`; the figures are those of the last step.
        clusters: clusters(ranks) returns a cluster to use; None: start a helper process, and close it afterwards.

    Raises:
        ValueError: there are no plans, or `Cluster.train` or `trace_fake` raises it.
    """
    named = _name_strategies(plans)
    states = states_of(optimizer)
    plays = not isinstance(model, nn.Module)
    timelines: dict[str, Timeline] = {}
    how: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "steps": steps}
    with borrow_clusters(clusters) as sized:
        for name, plan in named.items():
            cluster = sized(1 if plays else plan.ranks)
            if isinstance(model, nn.Module):
                timelines[name] = cluster.train(model, data, plan, show=False, **how).wait().timeline()
            else:
                timelines[name] = Timeline.of(trace_fake(model, plan, batch=data, cluster=cluster, **how))
    rows = [row for name, timeline in timelines.items() for row in _memory_rows(name, timeline, states)]
    origin = "of the last step" + (", played on tensors without content" if plays else ", measured")
    return MemoryByStrategy(tuple(rows), origin, timelines)


def _name_strategies(plans: Any) -> dict[str, Plan]:
    if isinstance(plans, int) and not isinstance(plans, bool) and plans > 1:
        plans = [Plan.ddp(plans), *(Plan(dp=plans, zero=stage) for stage in (1, 2, 3))]
    if not isinstance(plans, Mapping) and isinstance(plans, Sequence):
        words = [strategy(plan) if isinstance(plan, Plan) else "" for plan in plans]
        twice = {word for word in words if words.count(word) > 1}
        plans = {repr(plan) if word in twice else word: plan for word, plan in zip(words, plans, strict=True)}
    if not isinstance(plans, Mapping) or not plans or not all(isinstance(p, Plan) for p in plans.values()):
        raise ValueError(
            f"memory_by_strategy(plans={plans!r}): give Plans, such as [mk.Plan.ddp(4), mk.Plan.zero(3, 4)], or by "
            "name {'DDP': mk.Plan.ddp(4)}, or a number of ranks, 2 or more, for DDP and ZeRO-1, 2 and 3"
        )
    return dict(plans)


def _memory_rows(name: str, timeline: Timeline, states: float) -> Iterator[MemoryRow]:
    plan = Plan.from_json(timeline.meta["plan"])
    psi, dtype = int(timeline.meta["parameters"]), getattr(torch, timeline.meta["dtype"])
    for rank, (held, peak) in enumerate(zip(timeline.memory, timeline.peak_memory, strict=True)):
        expected = formula(plan, psi, states, rank, dtype.itemsize)
        yield MemoryRow(name, rank, held, sum(peak[category] for category in expected), expected)


def states_of(optimizer: Callable[[Any], torch.optim.Optimizer]) -> float:
    """Count the numbers s that an optimizer keeps per parameter, by trying it on a small one."""
    parameter = nn.Parameter(torch.zeros(4, 6))
    parameter.grad = torch.ones(4, 6)
    made = optimizer([parameter])
    made.step()
    kept = [value for value in made.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(value.numel() for value in kept if value.dim()) / parameter.numel()
