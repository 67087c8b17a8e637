"""Tensor parallelism in a function of your own, on the ranks of `cluster.run`: for inference, or a loop by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from mpkit.plan.mesh import Mesh
from mpkit.plan.tensor_plan import TensorPlan
from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.comm.process_group import ProcessGroup
from mpkit.strategies.models.own_draws import OwnDraws
from mpkit.strategies.models.randomness import may_draw
from mpkit.strategies.models.token_draws import TokenDraws
from mpkit.strategies.tensor.shards import shard_model

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context

__all__ = ["tensor_parallel"]

Model = TypeVar("Model", bound=nn.Module)


def tensor_parallel(
    ctx: Context,
    model: Model,
    plan: TensorPlan | None = None,
    *,
    group: ProcessGroup | None = None,
    sequence: bool = False,
    overlap: bool = True,
) -> Model:
    """Shard a model over the ranks, which then compute together what it computed on one.

    All ranks call this with the same model, and later call the model with the same inputs. Its parameters are this
    rank's parts; give them to an optimizer.

    >>> import mpkit as mk, torch
    >>> from mpkit.models import MLP
    >>> def scores(ctx, model, x):
    ...     return mk.tensor_parallel(ctx, model)(x)
    >>> model, x = MLP(2, 3), torch.ones(1, 2)
    >>> with mk.Cluster(ranks=2, device="cpu") as cluster:
    ...     found = cluster.run(scores, model, x)
    >>> torch.allclose(found[0], model(x), atol=1e-6)
    True

    Args:
        ctx: this rank's context.
        model: the whole model, the same on every rank; changed in place, and moved to the rank's device.
        plan: what to divide; None for `find_tensor_plan(model)`.
        group: the ranks that share the model; None for all.
        sequence: divide what is between regions by sequence.
        overlap: sum gradients of inputs while those of weights are computed.

    Returns:
        The model.

    Raises:
        ValueError: the model cannot be divided in this way.
    """
    if group is None:
        group = MeshAxes(ctx.comm, ctx.device, Mesh(tp=ctx.world_size)).communicator_of("tp")
    sharded = shard_model(model, group, plan, sequence=sequence, overlap=overlap)
    if sequence and may_draw(model):
        model.forward = _with_draws(model.forward, sharded.draws)
    model.to(ctx.device)
    for name, parameter in model.named_parameters():
        if name in sharded.partial and parameter.requires_grad:
            parameter.register_hook(partial(_sum, group))
    return model


def _with_draws(inner: Callable[..., Any], draws: OwnDraws) -> Callable[..., Any]:
    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with TokenDraws(draws):
            return inner(*args, **kwargs)

    return forward


def _sum(group: ProcessGroup, gradient: Tensor) -> Tensor:
    return group.all_reduce(gradient.clone())
