"""ZeRO for a model and a training loop of your own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from mpkit.plan.plan import Plan
from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.models.chain import layers_of
from mpkit.strategies.replicas.part import ReplicatedPart, shard_groups
from mpkit.strategies.replicas.zero import Zero
from mpkit.strategies.replicas.zero3 import zero_sync
from mpkit.strategies.stage.stage import Stage

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context

__all__ = ["shard"]


def shard(context: Context, model: nn.Module, stage: int = 3, **options: Any) -> Zero:
    """Shard a model of your own, in a function that `Cluster.run` calls on every rank.

    The model's layers work as before, on the same tensors in and out, but each rank holds only its shard of them.

    Args:
        context: the function's first argument.
        model: on `context.device`, or copied there.
        stage: ZeRO stage, 1 to 3.
        options: other fields of a Plan, such as prefetch.

    Raises:
        ValueError: a precision or ep is asked for, or the options are no Plan.

    >>> import torch, mpkit as mk
    >>> def train(ctx):
    ...     model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    ...     zero = shard(ctx, model)
    ...     optimizer = torch.optim.SGD([piece.held for piece in zero.pieces], lr=0.1)
    ...     zero.begin_step()
    ...     with zero.backward():
    ...         model(torch.ones(3, 4)).mean().backward()
    ...     zero.finish()
    ...     optimizer.step()
    ...     zero.renew()
    ...     with zero.gathered():
    ...         return [tuple(piece.held.shape) for piece in zero.pieces], model[0].weight.shape
    >>> with mk.Cluster(ranks=2, device="cpu") as cluster:
    ...     cluster.run(train)[0]
    ([(20,), (0,), (9,), (0,)], torch.Size([8, 4]))
    """
    if options.get("precision", "full") != "full":
        raise ValueError(
            f"shard(precision={options['precision']!r}): 16 bits need fp32 master weights for the optimizer, and here "
            "it is given the shards themselves. cluster.train(model, data, mk.Plan.zero(stage, dp), precision='fp16') "
            "has both."
        )
    plan = Plan(dp=context.world_size, zero=stage, **{"batchnorm": "local", **options})
    if plan.ep > 1:
        raise ValueError(
            f"shard(ep={plan.ep}): experts are divided in a training, cluster.train(model, data, {plan!r}, ...); in a "
            "loop of your own they are sharded like all other parameters: leave out ep"
        )
    stages = {0: Stage(0, layers_of(model), context.device)}
    axes = MeshAxes(context.comm, context.device, plan.mesh)
    return zero_sync(
        ReplicatedPart(context, plan, stages, axes.communicator_of("dp"), groups=shard_groups(plan, axes))
    )
