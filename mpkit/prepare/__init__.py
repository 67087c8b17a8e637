"""What happens to a training before any rank starts: everything is checked, and counted.

    arguments   are they what they should be, and do they fit each other?
    batches     the data, as far as the steps take it
    laid_out    who will have what, from
        localized   the model as a rank has it: its shards of layers, its part of sequences
        dry_run     model and loss once on tensors without content: shapes, and what they refuse
        count       FLOPs and bytes, layer by layer
        stages      where a chain is cut
        opened      where any other model is
    travel      the model, as it can be sent
    model_hooks     hooks, and whether they can run where it is in parts
    optimizers  the optimizer, tried on parts of the model as the ranks will have them
    unused      parameters without a gradient, where replicas would wait for it
    probe       model and loss on a few samples, all at once and in parts: are they the same?
    divided     does a model computed by tensor-parallel ranks compute what it computes whole?
    meta        what a trace tells of the run
    unwise      what works, and costs more than it need
    resume      checkpoints: where they go, and whether one can be gone on from

All of this happens in the caller's process, and leaves the caller's model and random state as they are.
"""

from __future__ import annotations

import warnings
from typing import Any, Unpack

from torch import nn

from mpkit.data_stream import Stream, is_stream
from mpkit.errors import UnwisePlan
from mpkit.loss.quotient import Quotient
from mpkit.parallel.feed import WholeBatches
from mpkit.parallel.job import TrainJob
from mpkit.plan import Plan
from mpkit.prepare.arguments import (
    check_integers,
    check_loss,
    check_model,
    check_plan,
    check_update,
)
from mpkit.prepare.batches import check_shares, check_split, of_every_size, take_batches
from mpkit.prepare.divided import check_divided
from mpkit.prepare.dry_run import quiet
from mpkit.prepare.how import How
from mpkit.prepare.laid_out import lay_out
from mpkit.prepare.meta import held_by_stage, meta_of
from mpkit.prepare.model_hooks import check_hooks, check_no_global_hooks, check_state_hooks, check_whole
from mpkit.prepare.optimizers import examine_optimizer, updated_by
from mpkit.prepare.probe import flops_of_a_sample, objective
from mpkit.prepare.recompute import check_recompute, recomputes_nothing
from mpkit.prepare.resume import check_saved, check_saving, facts_of, find_checkpoint, take_up
from mpkit.prepare.stages import check_gathered
from mpkit.prepare.travel import check_compiled, check_repeatable, ready_to_travel
from mpkit.prepare.unused import check_unused
from mpkit.prepare.unwise import warn_if_unwise
from mpkit.schedule import build

__all__ = ["TrainJob", "prepare"]


def prepare(
    model: nn.Module, data: Any, plan: Plan, *, ranks: int, by_name: bool = True, **how: Unpack[How]
) -> TrainJob:
    """Check a training and make it ready for the ranks.

    Args:
        model: any module. Where the plan cuts it: a chain of layers (`mpkit.models.chain`), or any other, which is
            opened (`mpkit.prepare.opened`). Left as it is.
        data: a sequence of (inputs, targets), or a DataLoader, of which `steps` are taken; or what gives them one after
            the other, such as a generator, of which the first are taken (`mpkit.data_stream`); or `mpkit.Batches` of a
            dataset. Inputs and targets: a tensor, a tuple or a dict of tensors, batch first.
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
    check_no_global_hooks()
    check_repeatable(model, plan)
    check_compiled(model, plan)
    hooked, model = model, ready_to_travel(model)
    # What comes one after the other is read where it goes on: with the random state of the caller, not a copy of it.
    data = take_batches(data, steps) if is_stream(data) else data
    with quiet():
        # ---- batches
        batches = data if isinstance(data, Stream) else take_batches(data, steps)
        sizes = of_every_size(batches, steps)
        check_split(sizes, plan)
        check_shares(model, sizes, plan)
        blocks = check_recompute(model, plan)
        # ---- who will have what
        rehearsed = Quotient(loss)
        laid = lay_out(model, sizes, plan, rehearsed, by_name=by_name)
        hooks = check_hooks(hooked, sizes[0][0], plan)
        check_whole(model, plan, laid.sharded[0].plan)
        check_state_hooks(model)
        first = laid.by_place[0]
        check_gathered(first.numbers, plan)
        unselective = recomputes_nothing(model, sizes[0][0], plan)
        check_unused(model, sizes[0], plan, rehearsed)
        check_divided(model, sizes[0], plan, rehearsed)
        places = updated_by(held_by_stage(model, laid), build(plan).stage_to_rank, plan.pp, model)
        examined = examine_optimizer(
            optimizer, model, plan, places, laid.sharded[0].shards, scheduled=lr_schedule is not None
        )
        facts = facts_of(model, examined)
        pairs = rehearsed.count is not None
        aim = objective(model, loss, batches, sizes[0], plan, pairs=pairs, flops=flops_of_a_sample(first))
    for warning in filter(None, (unselective, *aim.warnings)):
        warnings.warn(warning, UnwisePlan, stacklevel=3)
    # ---- checkpoints
    saving = check_saving(
        how.get("checkpoint_every"), how.get("checkpoint_dir"), how.get("checkpoint_keep", 2)
    )
    found = how.get("resume_from")
    if saving is not None or found is not None:
        check_saved(examined)
    resume = None if found is None else take_up(find_checkpoint(found), facts, steps)
    # ---- meta
    meta = meta_of(model, plan, sizes[0], laid) | {
        "batch_size": batches.size(0),
        "steps": steps,
        "first_step": 0 if resume is None else resume.head.step,
        "seed": seed,
        "blocks": list(blocks),
    }
    if isinstance(batches, WholeBatches) and batches.read_in:
        meta["read_before"] = {"seconds": batches.read_in, "batches": len(batches)}
    return TrainJob(
        plan, model, laid.stages, batches, aim.loss, optimizer, steps, seed, laid.by_place, list(model.state_dict()),
        meta, norm, lr_schedule, saving, resume, facts, laid.shared, hooks, nominal=aim.nominal,
    )  # fmt: skip
