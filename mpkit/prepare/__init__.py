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
from typing import Any, Unpack

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
from mpkit.prepare.how import How
from mpkit.prepare.laid_out import lay_out
from mpkit.prepare.meta import meta_of
from mpkit.prepare.resume import check_saving, facts_of, find_checkpoint, take_up
from mpkit.prepare.stages import check_gathered
from mpkit.prepare.unwise import warn_if_unwise

__all__ = ["TrainJob", "prepare"]


def prepare(
    model: nn.Module, data: Any, plan: Plan, *, ranks: int, by_name: bool = True, **how: Unpack[How]
) -> TrainJob:
    """Check a training and make it ready for the ranks.

    Args:
        model: any module. Where the plan cuts it: a chain of layers (`mpkit.models.chain`), or any other, which is
            opened (`mpkit.prepare.opened`). Left as it is.
        data: a sequence of (inputs, targets), or anything that gives them one after the other, such as a DataLoader,
            of which `steps` are taken; or `mpkit.Batches` of a dataset. Inputs and targets: a tensor, a tuple or a
            dict of tensors, batch first.
        plan: how to train.
        ranks: how many there are.
        by_name: messages between the ranks find each other by their names; else by their order (nccl).
        how: see `How`.

    Raises:
        ValueError: what was given cannot work; with the reason and what would work.
    """
    # ---- arguments
    loss, optimizer = how["loss"], how["optimizer"]
    norm, lr_schedule = how.get("max_grad_norm"), how.get("lr_schedule")
    check_model(model)
    check_plan(plan, ranks)
    steps, seed = check_integers(how["steps"], how.get("seed", 0))
    check_loss(loss)
    check_update(norm, lr_schedule, steps)
    warn_if_unwise(plan)
    model = _on_cpu(model)
    with quiet():
        # ---- batches
        batches = take_batches(data, steps)
        sizes = of_every_size(batches, steps)
        check_split(sizes, plan)
        check_shares(model, sizes, plan)
        # ---- who will have what
        laid = lay_out(model, sizes, plan, loss, by_name=by_name)
        first = laid.by_place[0]
        check_gathered(first.numbers, plan)
        check_optimizer(optimizer, layers_of(model), laid.stages if first.opened is None else [range(1)])
        check_elementwise(optimizer, model, plan)
        facts = facts_of(model, optimizer)
    # ---- checkpoints
    saving = check_saving(
        how.get("checkpoint_every"), how.get("checkpoint_dir"), how.get("checkpoint_keep", 2)
    )
    found = how.get("resume_from")
    resume = None if found is None else take_up(find_checkpoint(found), facts, steps)
    # ---- meta
    meta = meta_of(model, plan, sizes[0], laid) | {
        "batch_size": batches.size(0),
        "steps": steps,
        "first_step": 0 if resume is None else resume.head.step,
        "seed": seed,
    }
    return TrainJob(
        plan, model, laid.stages, batches, loss, optimizer, steps, seed, laid.by_place, list(model.state_dict()),
        meta, norm, lr_schedule, saving, resume, facts, laid.shared,
    )  # fmt: skip


def _on_cpu(model: nn.Module) -> nn.Module:
    """The model itself, or a copy where some of it is on a GPU: it travels to the ranks through host memory."""
    if all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers())):
        return model
    return copy.deepcopy(model).cpu()
