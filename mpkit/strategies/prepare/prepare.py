"""Prepare a training before any rank starts: resolve the plan, run the checks, build the job.

    arguments     check their types and values, and that the model can be sent; take the data that the steps use
    resolve       determine all that follows from the plan: stages, shards of layers, shapes between stages, FLOPs
    checks        reject what the run's own proof would not stop, or not as well (`mpkit.strategies.prepare.checks`)
    job           where checkpoints are saved, which steps are compared with serial training, what the trace records

All of this happens in the caller's process and does not change the caller's model or random state.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import torch
from torch import nn

from mpkit.plan.plan import Plan
from mpkit.strategies.checkpoint.files import CheckpointSaving, Resume
from mpkit.strategies.context.sequence import check_not_packed
from mpkit.strategies.job.feed import WholeBatches
from mpkit.strategies.job.job import EvaluationData, Problem, Procedure, TrainJob
from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.loss.counted import Quotient
from mpkit.strategies.models.experts import placed_experts
from mpkit.strategies.models.hooks import parameter_hooks
from mpkit.strategies.prepare.arguments import (
    check_ema,
    check_integers,
    check_loss,
    check_model,
    check_on_step,
    check_plan,
    check_surroundings,
    check_update,
    take_evaluation,
)
from mpkit.strategies.prepare.batches import check_split, is_stream, of_every_size, take_batches
from mpkit.strategies.prepare.checks import check_global_hooks, find_rejection
from mpkit.strategies.prepare.copies import ready_to_travel
from mpkit.strategies.prepare.isolation import on_threads, quiet
from mpkit.strategies.prepare.loss_form import find_loss_form
from mpkit.strategies.prepare.metadata import describe_run
from mpkit.strategies.prepare.optimizer import examine_optimizer
from mpkit.strategies.prepare.plan_warnings import count_recomputed, warn_if_nothing_recomputed
from mpkit.strategies.prepare.proof_steps import SpecialValues, check_verify, with_proof
from mpkit.strategies.prepare.resolve import resolve
from mpkit.strategies.prepare.resume import (
    check_saving,
    facts_of,
    find_checkpoint,
    name_training,
    take_up,
)
from mpkit.strategies.prepare.sample import SampleSeen, observe_sample
from mpkit.strategies.prepare.task import OptimizerTraits, Rejection, Task, TrainOptions, raise_rejection
from mpkit.strategies.update.optimizer import with_average

__all__ = ["TrainJob", "prepare"]


def prepare(
    model: nn.Module, data: Any, plan: Plan | None, *, ranks: int, by_name: bool = True, gpu: int | None = None,
    **options: Unpack[TrainOptions],
) -> TrainJob:  # fmt: skip
    """Check a training and prepare it for the ranks.

    Args:
        model: any module; it is not changed. `mpkit.strategies.prepare.partition` cuts what is no chain of layers.
        data: a sequence of (inputs, targets), a DataLoader or a generator, of which `steps` batches are taken; or
            `mpkit.Batches` of a dataset. Inputs and targets are a tensor, a tuple or a dict of tensors, batch first.
        plan: how to train; None: `Plan.serial()`.
        ranks: the number of ranks.
        by_name: whether messages between the ranks are matched by name; otherwise by order (nccl).
        gpu: the GPU on which the steps are verified; None: they are in the memory of this process.
        options: see `TrainOptions`.

    Raises:
        ValueError: the arguments cannot work; the message gives the reason and what would work.
    """
    # ---- arguments
    plan = Plan.serial() if plan is None else plan
    check_surroundings()
    check_model(model)
    check_plan(plan, ranks)
    asked, special = _check_options(options), SpecialValues(options["loss"])
    sent = ready_to_travel(model)
    # Generators are read with the caller's own random state, not a copy of it.
    data = take_batches(data, asked.steps) if is_stream(data) else data
    # One core is left to the fork server, which imports torch while the first training is prepared.
    with quiet(), on_threads(torch.get_num_threads() - 1):
        batches = take_batches(data, asked.steps)
        sizes = of_every_size(batches, asked.steps)
        check_split(sizes, plan)
        evaluation = take_evaluation(options.get("evaluate"), options.get("every"), sent)
        further = [] if evaluation is None else of_every_size(evaluation.batches, len(evaluation.batches))
        task = Task(
            sent, model, batches, sizes, Quotient(special), options["loss"], asked.optimizer,
            scheduled=options.get("lr_schedule") is not None,
            saves=any(options.get(name) is not None for name in ("checkpoint_every", "checkpoint_dir", "resume_from")),
        )  # fmt: skip
        # ---- resolve
        known = [*(batches if isinstance(batches, WholeBatches) else ()), *sizes, *further]
        for inputs, _ in known:
            check_not_packed(inputs, plan.cp)
        exchanges = plan.cp * plan.tp * plan.ep > 1
        sample = observe_sample(sent, sizes[0], plan) if exchanges else SampleSeen()
        resolved = resolve(sent, [*sizes, *further], plan, task.loss, by_name=by_name)
        task.form = find_loss_form(task, special.mean, at_once=resolved.computes_loss_at_once)
        # ---- checks
        raise_rejection(find_rejection(resolved, task))
        examined = _examine(plan, task)
        warn_if_nothing_recomputed(resolved, sent)
    # ---- job
    return _build_job(resolved, sample, task, examined, asked, evaluation, special.found, gpu, options)


def _examine(plan: Plan, task: Task) -> OptimizerTraits:
    try:
        return examine_optimizer(plan, task)
    except Rejection as rejection:
        raise ValueError(str(rejection)) from None


class CheckedOptions(NamedTuple):
    """Options that are checked and normalized."""

    optimizer: Any
    steps: int
    seed: int
    on_step: Any
    ema: float | None
    verify: Any


def _check_options(options: TrainOptions) -> CheckedOptions:
    steps, seed = check_integers(options["steps"], options.get("seed", 0))
    check_loss(options["loss"])
    check_update(options.get("max_grad_norm"), options.get("lr_schedule"), steps)
    check_global_hooks()
    on_step, ema = check_on_step(options.get("on_step")), check_ema(options.get("ema"))
    optimizer: Any = options["optimizer"]  # checked later
    if ema is not None and callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = with_average(optimizer, ema)
    return CheckedOptions(optimizer, steps, seed, on_step, ema, check_verify(options.get("verify", False)))


def _build_job(
    resolved: ResolvedPlan, sample: SampleSeen, task: Task, examined: OptimizerTraits, asked: CheckedOptions,
    evaluation: EvaluationData | None, special: set[float], gpu: int | None, options: TrainOptions,
) -> TrainJob:  # fmt: skip
    """Return the job of a training that passed the checks.

    Args:
        sample: what ranks exchange of one sample; special: the numbers that the loss treats by themselves.
    """
    model, batches = task.model, task.batches
    # ---- checkpoints
    facts = facts_of(model, examined)
    saving, resume = _check_checkpoints(options, facts, asked.steps)
    # ---- what and how
    assert task.form is not None, "it was resolved before"
    loss, nominal = task.form
    hooks = parameter_hooks(task.given_model)
    what = Problem(model, batches, loss, list(model.state_dict()), nominal, hooks, task.given_loss)
    how = Procedure(
        asked.optimizer, asked.steps, asked.seed, options.get("max_grad_norm"), options.get("lr_schedule"),
        saving, resume, facts, asked.on_step, evaluation, asked.ema, by_owner=examined.whole,
    )  # fmt: skip
    # ---- proof
    how = with_proof(how, asked.verify, what, task.batch, resolved, special, gpu)
    # ---- what the trace records
    meta = describe_run(model, task.batch, resolved, sample, by_owner=how.by_owner) | {
        "batch_size": batches.size(0),
        "steps": how.steps,
        "first_step": how.first_step,
        "seed": how.seed,
        "blocks": list(count_recomputed(model, resolved.plan.recompute)),
        "expert_order": placed_experts(model),
    }
    if isinstance(batches, WholeBatches) and batches.read_in:
        meta["read_before"] = {"seconds": batches.read_in, "batches": len(batches)}
    return TrainJob(what, how, resolved, meta)


def _check_checkpoints(
    options: TrainOptions, facts: dict[str, Any], steps: int
) -> tuple[CheckpointSaving | None, Resume | None]:
    """Return where checkpoints are saved, and the checkpoint to resume from."""
    every, folder = options.get("checkpoint_every"), options.get("checkpoint_dir")
    saving = check_saving(every, folder, options.get("checkpoint_keep", 2))
    resume_from = options.get("resume_from")
    resume = None if resume_from is None else take_up(find_checkpoint(resume_from), facts, steps)
    return saving and name_training(saving, resume), resume
