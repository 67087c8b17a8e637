"""mk.fully_shard: what can be asked for, and what cannot."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mpkit.common.tracebacks import public
from mpkit.plan.kinds import whole
from mpkit.plan.plan import Plan
from mpkit.strategies.prepare.arguments.task import raise_rejection
from mpkit.strategies.prepare.shared_memory import find_shared_memory
from mpkit.strategies.wrappers.fully_sharded import FullySharded
from mpkit.strategies.wrappers.loop_proof import checked_prove
from mpkit.strategies.wrappers.replicas import Group, check_module, size_of

__all__ = ["fully_shard"]

PRECISIONS: dict[Any, str] = {
    "fp32": "full", "full": "full", torch.float32: "full", None: "full",
    "bf16": "bf16", torch.bfloat16: "bf16", "fp16": "fp16", torch.float16: "fp16",
}  # fmt: skip
"""What may be given as precision, and the Plan's word for it."""


@public
def fully_shard(
    module: nn.Module, stage: int = 3, *, dp_shard: int | None = None, reshard_after_forward: bool = True,
    precision: str | torch.dtype | None = "fp32", bucket_mb: float = 25.0, prefetch: int = 1,
    find_unused_parameters: bool = False, group: Group = None, prove: int = 0,
) -> FullySharded:  # fmt: skip
    """Wrap a module of which each rank keeps a part: ZeRO's stages 1 to 3, of which FSDP is the third.

    Every rank calls this at the same time, in `Cluster.run` or under torchrun after `init_process_group`. Parameters
    and buffers become the first rank's. The loop is that of `mk.ddp`, and the optimizer is made afterwards, from
    `model.parameters()`: this rank's shares, under the model's names. It treats each element by itself, as AdamW does.

    >>> import mpkit as mk
    >>> def train(ctx):
    ...     model = mk.fully_shard(nn.Linear(4, 2), stage=3)
    ...     optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ...     model(torch.full((2, 4), float(ctx.rank))).square().mean().backward()
    ...     model.clip_grad_norm_(1.0)
    ...     optimizer.step()
    ...     shares = {name: tuple(p.shape) for name, p in model.named_parameters()}
    ...     return shares, tuple(model.state_dict()["weight"].shape)
    >>> with mk.Cluster(ranks=2, device="cpu") as cluster:
    ...     cluster.run(train)[0]
    ({'weight': (4, 1), 'bias': (2,)}, (2, 4))

    Args:
        module: on this rank's device; changed in place.
        stage: 1 divides the optimizer states, 2 the gradients too, 3 the parameters too.
        dp_shard: ranks per group of hybrid sharding (HSDP), such as the GPUs of a node; None: among all ranks.
        reshard_after_forward: True shards again what stage 3 has gathered; False is what stages 1 and 2 do.
        precision: "fp32" keeps the module's dtype; "bf16" and "fp16" compute and communicate in 16 bits. Shares are
            then fp32 master weights, outputs are fp32, and fp16's gradients are scaled inside, without a GradScaler.
        bucket_mb: the most MiB that are reduced together, in stages 1 and 2.
        prefetch: number of layers that stage 3 gathers ahead.
        find_unused_parameters: allow parameters that get no gradient in a backward. One that no rank used has none.
        group: the ranks that share the work: a communicator, torch's process group, a DeviceMesh of one axis, or of two
            for hybrid sharding (ranks along the second one share the shards); None for all.
        prove: the number of first steps that are compared with plain PyTorch, on each rank's copy of the whole module.

    Returns:
        The wrapper: `model.module` is the module, `state_dict()` returns whole tensors on every rank,
        `summon_full_params()` has it whole in its block, and `clip_grad_norm_` clips by the norm over all ranks.

    Raises:
        ValueError: there is no process group, no such stage, number of ranks or precision, nothing to train, or it is
            wrapped already.
        NotSerial: on all ranks, in `loss.backward()`: a step that is compared is not that of plain PyTorch.
    """
    check_module(module, "mk.fully_shard")
    raise_rejection(find_shared_memory(module))
    _check(stage, precision, prove)
    dp_shard = _checked_groups(dp_shard, group, ranks := size_of(module, group))
    _check_resharding(reshard_after_forward, stage)
    plan = Plan(
        dp=ranks, dp_shard=dp_shard, zero=stage,
        precision=PRECISIONS[precision], batchnorm="local",
        bucket_mb=bucket_mb, prefetch=prefetch, unused="allow" if find_unused_parameters else "error",
    )  # fmt: skip
    return FullySharded(module, plan, group, prove)


def _check(stage: Any, precision: Any, prove: Any) -> None:
    checked_prove("mk.fully_shard", prove)
    if stage not in (1, 2, 3) or isinstance(stage, bool):
        raise ValueError(
            f"mk.fully_shard(stage={stage!r}): ZeRO has stage 1 (optimizer states are divided), 2 (gradients too) "
            "and 3 (parameters too, which is FSDP). mk.ddp(module) divides nothing"
        )
    if precision not in PRECISIONS:
        raise ValueError(
            f"mk.fully_shard(precision={precision!r}): there are 'fp32', 'bf16' and 'fp16' (or torch.bfloat16, "
            "torch.float16)"
        )


def _checked_groups(dp_shard: Any, group: Group, ranks: int) -> int | None:
    """Return the number of ranks per group; that of a mesh of two axes is the second one's."""
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        return group.size(1)
    if dp_shard is None:
        return None
    size = whole(dp_shard)
    if size is None or size < 2 or ranks % size:
        fits = [n for n in range(2, ranks + 1) if ranks % n == 0]
        raise ValueError(
            f"mk.fully_shard(dp_shard={dp_shard!r}): the {ranks} ranks are divided into groups of as many, 2 or more, "
            f"such as dp_shard={fits[0] if fits else 2}; dp_shard=None shards among all of them"
        )
    return size


def _check_resharding(reshard: Any, stage: int) -> None:
    """Check that stage 3 shards what a forward has gathered among all ranks, and that other stages are not asked to."""
    if reshard is True or (reshard is False and stage < 3):
        return
    raise ValueError(
        f"mk.fully_shard(reshard_after_forward={reshard!r}, stage={stage}): stage 3 shards what a forward has gathered "
        "among all ranks, or among those of a node with dp_shard= ranks per group; with stage=2 parameters stay whole"
    )
