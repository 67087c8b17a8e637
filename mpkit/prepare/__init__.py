"""What happens to a training before any rank starts: everything is checked, and counted.

    arguments   are they what they should be, and do they fit each other?
    batches     the data, as far as the steps take it
    laid_out    who will have what, from
        localized   the model as a rank has it: its shards of layers, its part of sequences
        dry_run     model and loss once on tensors without content: shapes, and what they refuse
        count       FLOPs and bytes, layer by layer
        stages      where a chain is cut
        opened      where any other model is
    meta        what a trace tells of the run
    unwise      what works, and costs more than it need
    resume      checkpoints: where they go, and whether one can be gone on from

All of this happens in the caller's process, and leaves the caller's model and random state as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpkit.models.chain import layers_of
from mpkit.parallel.job import TrainJob
from mpkit.plan import Plan
from mpkit.prepare.arguments import (
    check_integers,
    check_loss,
    check_model,
    check_optimizer,
    check_plan,
    check_update,
)
from mpkit.prepare.batches import check_shares, check_split, of_every_size, take_batches
from mpkit.prepare.dry_run import quiet
from mpkit.prepare.elementwise import check_elementwise
from mpkit.prepare.laid_out import lay_out
from mpkit.prepare.meta import meta_of
from mpkit.prepare.resume import check_saving, facts_of, find_checkpoint, take_up
from mpkit.prepare.stages import check_gathered
from mpkit.prepare.unwise import warn_if_unwise

__all__ = ["TrainJob", "prepare"]


def prepare(
    model: nn.Module,
    data: Any,
    plan: Plan,
    *,
    loss: Callable[[Any, Any], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: int,
    seed: int = 0,
    ranks: int,
    max_grad_norm: float | None = None,
    lr_schedule: Callable[[int], float] | None = None,
    checkpoint_every: int | None = None,
    checkpoint_dir: Any = None,
    checkpoint_keep: int = 2,
    resume_from: Any = None,
    by_name: bool = True,
) -> TrainJob:
    """Check a training and make it ready for the ranks.

    Args:
        model: any module. Where the plan cuts it: a chain of layers (`mpkit.models.chain`), or any other, which is
            opened (`mpkit.prepare.opened`). Left as it is.
        data: a sequence of (inputs, targets), or anything that gives them one after the other, such as a DataLoader,
            of which `steps` are taken; or `mpkit.Batches` of a dataset. Inputs and targets: a tensor, a tuple or a
            dict of tensors, batch first.
        plan: how to train.
        loss: loss(outputs, targets) -> scalar, the mean over the batch.
        optimizer: optimizer(params) -> torch.optim.Optimizer.
        steps: how many; step i takes data[i % len(data)].
        seed: of the ranks' random state.
        ranks: how many there are.
        max_grad_norm: gradients are clipped to this norm, all together; None: they are not.
        lr_schedule: what the learning rate is multiplied by in step i; None: 1.
        checkpoint_every: steps from one checkpoint to the next; None: none are saved.
        checkpoint_dir: the folder that they are saved in.
        checkpoint_keep: how many of the newest stay.
        resume_from: a checkpoint, or a folder of checkpoints: its newest whole one.
        by_name: messages between the ranks find each other by their names; else by their order (nccl).

    Raises:
        ValueError: what was given cannot work; with the reason and what would work.
    """
    check_model(model)
    check_plan(plan, ranks)
    steps, seed = check_integers(steps, seed)
    check_loss(loss)
    check_update(max_grad_norm, lr_schedule, steps)
    warn_if_unwise(plan)
    model = _on_cpu(model)
    with quiet():
        batches = take_batches(data, steps)
        sizes = of_every_size(batches, steps)
        check_split(sizes, plan)
        check_shares(model, sizes, plan)
        laid = lay_out(model, sizes, plan, loss, by_name=by_name)
        check_gathered(laid.by_place[0].numbers, plan)
        check_optimizer(
            optimizer, layers_of(model), laid.stages if laid.by_place[0].opened is None else [range(1)]
        )
        check_elementwise(optimizer, model, plan)
        facts = facts_of(model, optimizer)
    saving = check_saving(checkpoint_every, checkpoint_dir, checkpoint_keep)
    resume = None if resume_from is None else take_up(find_checkpoint(resume_from), facts, steps)
    meta = {
        **meta_of(model, plan, sizes[0], laid),
        "batch_size": batches.size(0),
        "steps": steps,
        "first_step": 0 if resume is None else resume.head.step,
        "seed": seed,
    }
    return TrainJob(
        plan=plan,
        model=model,
        stages=laid.stages,
        batches=batches,
        loss=loss,
        optimizer=optimizer,
        steps=steps,
        seed=seed,
        local=laid.by_place,
        names=list(model.state_dict()),
        meta=meta,
        max_grad_norm=max_grad_norm,
        lr_schedule=lr_schedule,
        saving=saving,
        resume=resume,
        facts=facts,
        shared=laid.shared,
    )


def _on_cpu(model: nn.Module) -> nn.Module:
    """The model itself, or a copy where some of it is on a GPU: it travels to the ranks through host memory."""
    if all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers())):
        return model
    return copy.deepcopy(model).cpu()
