"""mk.pipeline: what can be asked for, and what cannot; `pipelined_module` is the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.common.tracebacks import public
from mpkit.plan.plan import Plan
from mpkit.plan.schedule import Schedule
from mpkit.plan.schedule.catalogue import ONE_F_ONE_B
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.prepare.copies import copy_model
from mpkit.strategies.prepare.prepare import prepare
from mpkit.strategies.proof.loop import LoopProof
from mpkit.strategies.proof.plain_module import PlainModule
from mpkit.strategies.proof.ranks import Ranks
from mpkit.strategies.replicas.buffers import broadcast_all
from mpkit.strategies.wrappers.pipelined_module import PipelineParallel
from mpkit.strategies.wrappers.replicas import check_module, context_for
from mpkit.strategies.wrappers.wrapper import checked_prove

__all__ = ["pipeline"]


@public
def pipeline(
    module: nn.Module,
    schedule: str | Schedule = ONE_F_ONE_B,
    *,
    example: Any,
    loss: Callable[[Any, Any], Tensor],
    microbatches: int | None = None,
    prove: int = 1,
    **options: Any,
) -> PipelineParallel:
    """Divide a module into stages over all ranks, which a schedule runs on micro-batches.

    Every rank calls this at the same time, in a function that `Cluster.run` calls or under torchrun after
    `init_process_group`. Parameters and buffers become the first rank's; then each rank keeps its stages, whose
    parameters it gives to an optimizer. A schedule runs forwards and backwards in an order of its own, so
    `model.step(inputs, targets)` takes the place of a forward, a loss and a backward, as `schedule.step` does in
    torch.distributed.pipelining.

    >>> import mpkit as mk
    >>> def train(ctx):
    ...     x, y, _ = torch.ones(4, 2), torch.zeros(4, 2), torch.manual_seed(0)
    ...     module = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    ...     model = mk.pipeline(module, "1f1b", example=(x, y), loss=nn.functional.mse_loss)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     before = model.step(x, y)
    ...     optimizer.step()
    ...     return model.step(x, y) < before, list(dict(model.named_parameters()))
    >>> with mk.Cluster(ranks=2, device="cpu") as cluster:
    ...     cluster.run(train)
    [rank 0] mk.pipeline: equal to plain PyTorch in step 1: gradients within 0
    [(True, ['0.weight', '0.bias']), (True, ['2.weight', '2.bias'])]

    Args:
        module: the whole module; changed in place.
        schedule: its name, as in `mk.Plan`, or a `mk.Schedule`.
        example: (inputs, targets) of a whole batch, of which only the shapes matter, or a list of such pairs if batches
            differ in shape.
        loss: loss(outputs, targets) -> scalar, the mean over the batch.
        microbatches: into how many micro-batches a batch is divided; None for the number of ranks.
        prove: the number of first steps whose loss and gradients are compared with plain PyTorch on each rank; 0: none.
        options: other fields of a Plan that a pipeline has: virtual_stages, recompute, cut.

    Returns:
        The wrapper. `state_dict()` returns the whole module's on every rank.

    Raises:
        ValueError: there is no process group, the module cannot be divided or has nothing to train, or the schedule
            does not fit the number of ranks.
    """
    _check(module, loss, options, prove)
    context = context_for(module)
    plan = Plan(pp=(n := context.world_size), schedule=schedule, microbatches=microbatches or n, **options)
    proof = _begin_proof(module, context.comm, loss, prove) if prove else None
    broadcast_all(context.comm, module)
    batches = [example] if isinstance(example, tuple) else list(example)
    job = prepare(
        module, batches, plan, ranks=n, steps=len(batches), loss=loss, by_name=context.comm.wire.by_name,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),  # only examined
    )  # fmt: skip
    return PipelineParallel(context, job, proof)


def _begin_proof(module: nn.Module, comm: Communicator, loss: Any, steps: int) -> LoopProof:
    ranks, plain = Ranks("mk.pipeline", comm.ranks, comm.handle), PlainModule(copy_model(module), loss=loss)
    return LoopProof("mk.pipeline", ranks, plain, steps)


def _check(module: Any, loss: Any, options: Mapping[str, Any], prove: Any) -> None:
    check_module(module, "mk.pipeline")
    checked_prove("mk.pipeline", prove)
    unknown = sorted(set(options) - {"virtual_stages", "recompute", "cut"})
    if unknown:
        raise ValueError(
            f"mk.pipeline({unknown[0]}=...): of a Plan's fields it takes virtual_stages, recompute and cut. For "
            "replicas of pipelines, 16 bits and all else Cluster.train takes a whole Plan"
        )
    if not callable(loss):
        raise ValueError(
            f"mk.pipeline(loss={loss!r}): the last stage computes the loss, so it is needed here: "
            "loss=torch.nn.functional.cross_entropy, or any loss(outputs, targets) -> scalar"
        )
