"""The memory of a model by strategy: what each rank holds, compared with the formulas.

Of psi parameters, trained by n ranks with an optimizer that keeps s numbers for each (Adam: 2), a rank holds, in bytes:

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

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from mpkit.common.display import ChartedResult
from mpkit.common.tracebacks import public
from mpkit.launch.session.cluster import Cluster, borrow_clusters
from mpkit.plan.plan import Plan
from mpkit.prediction.dry_run import trace_fake
from mpkit.prediction.experiments.scaling import strategy
from mpkit.timeline.timeline import Timeline
from mpkit.trace import CATEGORIES

# ---- the formulas


def formula(plan: Plan, psi: int, states: float = 2, rank: int = 0, itemsize: int = 4) -> dict[str, float]:
    """Compute the bytes of params, grads and optimizer that a rank holds, as in the table above.

    >>> zero = formula(Plan(dp=64, zero=1, precision="bf16"), psi=7_500_000_000, itemsize=2)
    >>> round(sum(zero.values()) / 1e9, 1)  # table 1 of the ZeRO paper, 7.5 B parameters on 64 GPUs
    31.4

    Args:
        plan: the plan whose strategy to use.
        psi: the number of parameters.
        states: the numbers s that the optimizer keeps per parameter.
        rank: the rank's number.
        itemsize: b, the bytes per parameter in the precision of the computation.
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
    """One rank under one strategy.

    Attributes:
        strategy: the strategy's name.
        rank: the rank's number.
        held: the bytes held when the rank holds most, by category.
        states: the most bytes of params, grads and optimizer in a step, each at its own peak, as the formulas say.
        formula: bytes of params, grads and optimizer by the formulas.
    """

    strategy: str
    rank: int
    held: Mapping[str, int]
    states: int
    formula: Mapping[str, float]


@dataclass(frozen=True)
class MemoryByStrategy(ChartedResult):
    """What each rank holds by strategy: prints as a table, shows itself as a chart in a notebook.

    The chart (`figure`) stacks what each rank holds at its peak, with the formula as a line across the bar.

    Attributes:
        rows: one per rank, strategy by strategy.
        how: where the figures come from, in words.
        answers: the timeline of each strategy, by its name: step time, causes, memory at the peak.
    """

    rows: tuple[MemoryRow, ...]
    how: str
    answers: Mapping[str, Timeline] = field(repr=False, compare=False)

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
    model: nn.Module | Callable[[], nn.Module],
    data: Any,
    plans: int | Sequence[Plan] | Mapping[str, Plan] = 4,
    *,
    loss: Callable[[Any, Any], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: int = 2,
    clusters: Callable[[int], Cluster] | None = None,
) -> MemoryByStrategy:
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
    with borrow_clusters(clusters) as sized:
        for name, plan in named.items():
            cluster = sized(1 if plays else plan.ranks)
            if isinstance(model, nn.Module):
                run = cluster.train(
                    model, data, plan, loss=loss, optimizer=optimizer, steps=steps, show=False
                ).wait()
                timelines[name] = run.timeline()
            else:
                trace = trace_fake(
                    model, plan, batch=data, loss=loss, optimizer=optimizer, steps=steps, cluster=cluster
                )
                timelines[name] = Timeline.of(trace)
    rows = [row for name, timeline in timelines.items() for row in _rows(name, timeline, states)]
    how = "of the last step" + (", played on tensors without content" if plays else ", measured")
    return MemoryByStrategy(tuple(rows), how, timelines)


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


def _rows(name: str, timeline: Timeline, states: float) -> Iterator[MemoryRow]:
    plan = Plan.from_json(timeline.meta["plan"])
    psi, dtype = int(timeline.meta["parameters"]), getattr(torch, timeline.meta["dtype"])
    for rank, (held, peak) in enumerate(zip(timeline.memory, timeline.peak_memory, strict=True)):
        expected = formula(plan, psi, states, rank, dtype.itemsize)
        yield MemoryRow(name, rank, held, sum(peak[category] for category in expected), expected)


def states_of(optimizer: Callable[[Any], torch.optim.Optimizer]) -> float:
    """Count the numbers s that an optimizer keeps per parameter, by trying it on a small one.

    >>> states_of(torch.optim.AdamW), states_of(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    (2.0, 1.0)
    """
    parameter = nn.Parameter(torch.zeros(4, 6))
    parameter.grad = torch.ones(4, 6)
    made = optimizer([parameter])
    made.step()
    kept = [value for value in made.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(value.numel() for value in kept if value.dim()) / parameter.numel()
