"""Prepare a training before any rank starts: everything is checked and counted.

    arguments     check that they are valid and fit each other, and that the model can be sent
    batches       take the data that the steps use, and check how it is split
    resolve       determine all that follows from the plan: stages, shards of layers, shapes between stages, FLOPs
    fit           refuse hooks, unused parameters and divided layers with which this plan would be wrong
    optimizer     check that it works on parts of the model, or try it
    probe         compare model and loss on a few samples, all at once and in parts
    checkpoints   determine where they are saved, and whether training can resume from one
    proof         determine which steps are compared with serial training
    meta          collect what the trace records about the run

All of this happens in the caller's process and does not change the caller's model or random state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from mpkit.common.caught import report
from mpkit.plan.plan import Plan
from mpkit.strategies.checkpoint.files import CheckpointSaving, Resume
from mpkit.strategies.data.stream import Stream, is_stream
from mpkit.strategies.job.feed import WholeBatches
from mpkit.strategies.job.job import Problem, Procedure, TrainJob
from mpkit.strategies.job.resolved import ResolvedPlan
from mpkit.strategies.loss.quotient import Quotient
from mpkit.strategies.models.hooks import Hook
from mpkit.strategies.prepare.arguments.arguments import (
    check_integers,
    check_loss,
    check_model,
    check_plan,
    check_surroundings,
    check_update,
)
from mpkit.strategies.prepare.arguments.batches import check_shares, check_split, of_every_size, take_batches
from mpkit.strategies.prepare.arguments.between_steps import check_ema, check_on_step, take_evaluation
from mpkit.strategies.prepare.arguments.train_options import TrainOptions
from mpkit.strategies.prepare.dry_run.dry_run import quiet
from mpkit.strategies.prepare.dry_run.quiet import on_threads
from mpkit.strategies.prepare.hooks import (
    check_hooks,
    check_no_global_hooks,
    check_state_hooks,
    check_whole,
)
from mpkit.strategies.prepare.layers import (
    check_compiled,
    check_embeddings,
    check_repeatable,
    ready_to_travel,
)
from mpkit.strategies.prepare.optimizer.examine import examine_optimizer
from mpkit.strategies.prepare.optimizer.trial import Examined
from mpkit.strategies.prepare.outputs import check_unused
from mpkit.strategies.prepare.probe import objective
from mpkit.strategies.prepare.proof_steps import SpecialValues, check_verify, with_proof
from mpkit.strategies.prepare.recompute import check_kept, check_recompute, recomputes_nothing
from mpkit.strategies.prepare.resolve.metadata import meta_of
from mpkit.strategies.prepare.resolve.resolve import resolve
from mpkit.strategies.prepare.resolve.stages import check_gathered
from mpkit.strategies.prepare.resume import (
    check_saved,
    check_saving,
    facts_of,
    find_checkpoint,
    name_training,
    take_up,
)
from mpkit.strategies.prepare.tensor_plan.compare_shards import check_divided
from mpkit.strategies.update.average import with_average

__all__ = ["TrainJob", "prepare"]


def prepare(
    model: nn.Module, data: Any, plan: Plan | None, *, ranks: int, by_name: bool = True, gpu: int | None = None,
    **options: Unpack[TrainOptions],
) -> TrainJob:  # fmt: skip
    """Check a training and prepare it for the ranks.

    Args:
        model: any module; it is not changed. `mpkit.strategies.prepare.partition` cuts what is no chain of layers.
        data: a sequence of (inputs, targets) or a DataLoader, of which `steps` batches are taken; or a stream such as a
            generator, of which only the first batches are taken (`mpkit.strategies.data.stream`); or `mpkit.Batches`
            of a dataset. Inputs and targets are a tensor, a tuple or a dict of tensors, batch first.
        plan: how to train; None: `Plan.serial()`.
        ranks: the number of ranks.
        by_name: whether messages between the ranks are matched by name; otherwise by order (nccl).
        gpu: the GPU on which the steps are verified; None: they are in the memory of this process.
        options: see `TrainOptions`.

    Raises:
        ValueError: the arguments cannot work; the message gives the reason and what would work.
    """
    # ---- arguments
    asked = _check_arguments(model, Plan.serial() if plan is None else plan, ranks, options)
    plan, steps, hooked, model = asked.plan, asked.steps, model, ready_to_travel(model)
    # A stream is read with the caller's own random state, not a copy of it, since reading continues there later.
    data = take_batches(data, steps) if is_stream(data) else data
    # One core is left to the fork server, which imports torch while the first training is prepared.
    with quiet(), on_threads(torch.get_num_threads() - 1):
        # ---- batches
        batches = data if isinstance(data, Stream) else take_batches(data, steps)
        sizes = of_every_size(batches, steps)
        check_split(sizes, plan)
        check_shares(model, sizes, plan)
        evaluation = take_evaluation(options.get("evaluate"), options.get("every"), model)
        further = [] if evaluation is None else of_every_size(evaluation.batches, len(evaluation.batches))
        # ---- resolve
        blocks = check_recompute(model, plan)
        rehearsed = Quotient(heard := SpecialValues(asked.loss))
        resolved = resolve(model, [*sizes, *further], plan, rehearsed, by_name=by_name)
        # ---- fit
        hooks = _check_fit(hooked, model, sizes[0], resolved, rehearsed)
        # ---- optimizer
        scheduled = options.get("lr_schedule") is not None
        examined = examine_optimizer(asked.optimizer, model, resolved, hooked, scheduled=scheduled)
        # ---- probe
        aim = objective(model, asked.loss, batches, sizes[0], resolved, pairs=rehearsed.count is not None)
        unselective = recomputes_nothing(model, sizes[0][0], plan)
    for warning in filter(None, (unselective, *aim.warnings)):
        report(warning)
    # ---- checkpoints
    facts = facts_of(model, examined)
    saving, resume = _check_checkpoints(options, examined, facts, steps)
    what = Problem(model, batches, aim.loss, list(model.state_dict()), aim.nominal, hooks, asked.loss)
    how = Procedure(
        asked.optimizer, steps, asked.seed, options.get("max_grad_norm"), options.get("lr_schedule"),
        saving, resume, facts, asked.on_step, evaluation, asked.ema,
    )  # fmt: skip
    how = with_proof(how, asked.verify, what, sizes[0], resolved, heard.found, gpu)
    # ---- meta
    meta = meta_of(model, sizes[0], resolved) | _facts_of_run(batches, how, blocks)
    return TrainJob(what, how, resolved, meta)


class CheckedArguments(NamedTuple):
    """The given arguments, checked and normalized."""

    plan: Plan
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    steps: int
    seed: int
    on_step: Callable[[Any, int], Any] | None
    ema: float | None
    verify: Any


def _check_arguments(model: nn.Module, plan: Plan, ranks: int, options: TrainOptions) -> CheckedArguments:
    check_surroundings()
    check_model(model)
    check_plan(plan, ranks)
    steps, seed = check_integers(options["steps"], options.get("seed", 0))
    check_loss(options["loss"])
    check_update(options.get("max_grad_norm"), options.get("lr_schedule"), steps)
    check_no_global_hooks()
    check_embeddings(model, shared=plan.dp * plan.cp * plan.tp > 1)
    check_repeatable(model, plan)
    check_compiled(model, plan)
    on_step, ema = check_on_step(options.get("on_step")), check_ema(options.get("ema"))
    optimizer: Any = options["optimizer"]  # checked later
    if ema is not None and callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = with_average(optimizer, ema)
    verify = check_verify(options.get("verify", False))
    return CheckedArguments(plan, options["loss"], optimizer, steps, seed, on_step, ema, verify)


def _check_fit(
    hooked: nn.Module, model: nn.Module, batch: tuple[Any, Any], resolved: ResolvedPlan, loss: Quotient
) -> list[Hook]:
    """Refuse models with which this plan would be wrong; return the hooks on parameters, which ranks register anew."""
    plan = resolved.plan
    hooks = check_hooks(hooked, batch[0], resolved)
    check_whole(model, plan, resolved.sharded[0].plan)
    check_state_hooks(model)
    check_gathered(resolved)
    check_unused(model, batch, plan, loss)
    check_kept(model, batch[0], resolved)
    check_divided(model, batch, plan, loss)
    return hooks


def _check_checkpoints(
    options: TrainOptions, examined: Examined, facts: dict[str, Any], steps: int
) -> tuple[CheckpointSaving | None, Resume | None]:
    """Return where checkpoints are saved, and the checkpoint to resume from."""
    every, folder = options.get("checkpoint_every"), options.get("checkpoint_dir")
    saving, resume_from = (
        check_saving(every, folder, options.get("checkpoint_keep", 2)),
        options.get("resume_from"),
    )
    if saving is not None or resume_from is not None:
        check_saved(examined)
    resume = None if resume_from is None else take_up(find_checkpoint(resume_from), facts, steps)
    return saving and name_training(saving, resume), resume


def _facts_of_run(batches: Any, how: Procedure, blocks: tuple[int, int]) -> dict[str, Any]:
    """Return what the trace records about the run, besides model and plan."""
    facts: dict[str, Any] = {
        "batch_size": batches.size(0),
        "steps": how.steps,
        "first_step": how.first_step,
        "seed": how.seed,
        "blocks": list(blocks),
    }
    if isinstance(batches, WholeBatches) and batches.read_in:
        facts["read_before"] = {"seconds": batches.read_in, "batches": len(batches)}
    return facts
