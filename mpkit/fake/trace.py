"""The caller's side of `trace_fake`: checks, one real process, and the Trace of all ranks from what it played.

Phases:

    check    the plan and the hardware, before a process starts
    play     the ranks that differ, one after the other (`mpkit.fake.play`)
    mirror   every rank gets the records of the one that does the same (`mpkit.fake.mirror`)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mpkit.catalogue import hardware as find
from mpkit.cluster import Cluster
from mpkit.devices import Hardware
from mpkit.fake.mirror import Mirror
from mpkit.lent import lent
from mpkit.plan import Plan
from mpkit.trace import Trace
from mpkit.tracebacks import public

if TYPE_CHECKING:
    from mpkit.fake.play import Played

__all__ = ["trace_fake"]


@public
def trace_fake(
    model_fn: Callable[[], torch.nn.Module],
    plan: Plan,
    *,
    batch: Any,
    loss: Callable[[Any, Any], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: int = 1,
    rank: int | None = None,
    hardware: Hardware | str = "8x-a100-nvlink",
    max_grad_norm: float | None = None,
    cluster: Cluster | None = None,
) -> Trace:
    """What the ranks of a training would do, played by one process on tensors that have shapes and no content.

    The strategy's own code runs, at full size: only the numbers are missing. The trace has every op with its FLOPs,
    every communication with its payload, memory by category, and no losses. `Timeline.of` puts it on a clock.

    >>> import torch, mpkit as mk
    >>> trace = mk.trace_fake(
    ...     lambda: torch.nn.Sequential(torch.nn.Linear(4096, 4096, bias=False)), mk.Plan.ddp(16),
    ...     batch=(torch.empty(64, 4096, device="meta"), torch.empty(64, 4096, device="meta")),
    ...     loss=torch.nn.functional.mse_loss, optimizer=torch.optim.AdamW)
    >>> mk.Timeline.of(trace).peak_memory[15]["optimizer"] // 2**20  # MiB: AdamW's two moments, 4 bytes each
    128

    Any plan can be played; of a 4 x 4 x 4 mesh one rank a stage.

    >>> plan = mk.Plan(pp=2, dp=2, tp=2, schedule="1f1b", microbatches=4)
    >>> tokens = torch.empty(16, 64, dtype=torch.long, device="meta")
    >>> trace = mk.trace_fake(lambda: mk.models.GPT(layers=2), plan, batch=(tokens, tokens),
    ...     loss=mk.models.next_token_loss, optimizer=torch.optim.AdamW)
    >>> trace.meta["fake"]["stands_for"]
    [0, 0, 0, 0, 4, 4, 4, 4]

    Times within an action are counted operator by operator: the longer of FLOPs / rate and bytes / bandwidth
    (the roofline). Ranks that do the same are played once. Nothing overflows; gradients are above the norm to clip to.

    Args:
        model_fn: makes the model; called where tensors have no content, so that it takes no memory.
        plan: any.
        batch: (inputs, targets) of the whole global batch, as for `Cluster.train`, or a function that makes them.
            Only the shapes matter: `torch.empty(..., device="meta")` takes no memory.
        loss: loss(outputs, targets) -> scalar, the mean over the batch, or (total, count).
        optimizer: optimizer(params) -> torch.optim.Optimizer.
        steps: how many. DDP's first differs from the rest: buckets are laid out anew after it.
        rank: play this one's places along dp and tp, for all others there; None: the first of each kind. Along pp and
            cp all are played, since each has other work.
        hardware: whose device the times are of, a name in `mk.hardware()` or a `Hardware`.
        max_grad_norm: clip gradients to this norm; None: do not.
        cluster: whose helper process to use, any will do; None: one of its own.

    Raises:
        ValueError: the plan has no such rank, or the model, batch, loss or optimizer cannot work.
        RankFailed: the model looks at its tensors' values, which are not there.
    """
    # ---- check
    from mpkit.fake.play import Script, play

    machine = find(hardware)
    _check(model_fn, plan, rank)
    script = Script(model_fn, batch, plan, loss, optimizer, steps, max_grad_norm, machine.device, rank)
    # ---- play
    with lent(cluster) as used:
        played = used.run(play, script)[0]
    if played.error:
        raise ValueError(played.error)
    # ---- mirror
    return _mirrored(played, plan, rank, machine)


def _mirrored(played: Played, plan: Plan, rank: int | None, machine: Hardware) -> Trace:
    """Every rank has the records of the one that does the same; and what was played, for who reads the trace."""
    first = min(played.ranks)
    fake = {
        "rank": rank,
        "played": sorted(played.ranks),
        "stands_for": played.stands_for,
        "device": machine.device.name,
        "clock": "operator by operator: FLOPs or bytes on that device, whichever takes longer",
    }
    meta = {
        "world_size": plan.ranks, "device": "cpu", "backend": "fake", **played.meta,
        "hardware": machine.name, "fake": fake,
    }  # fmt: skip
    assert played.ranks[first].state == "finished"
    mirrors = {each: Mirror(recorded, each, plan.mesh) for each, recorded in played.ranks.items()}
    return Trace([mirrors[each].of(other) for other, each in enumerate(played.stands_for)], meta)


def _check(model_fn: Any, plan: Any, rank: Any) -> None:
    if isinstance(model_fn, torch.nn.Module) or not callable(model_fn):
        raise ValueError(
            f"trace_fake({type(model_fn).__name__}): a function that makes the model is wanted, so that it can be made "
            "without memory: trace_fake(lambda: mpkit.models.GPT(layers=48, width=1600, heads=25), ...)"
        )
    if not isinstance(plan, Plan):
        raise ValueError(f"plan={plan!r}: give a Plan, such as mk.Plan.zero(3, 64)")
    if rank is not None and (
        isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < plan.ranks
    ):
        raise ValueError(
            f"rank={rank!r}: {plan} has the ranks 0 to {plan.ranks - 1}; None plays one of each kind"
        )
