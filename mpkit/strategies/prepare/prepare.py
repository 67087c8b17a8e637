"""Prepare a training before any rank starts: resolve the plan, run the checks, build the job.

    arguments     check their types and values, and that the model can be sent; take the data that the steps use
    resolve       determine all that follows from the plan: stages, shards of layers, shapes between stages, FLOPs
    checks        reject what the run's own proof would not stop, or not as well (`mpkit.strategies.prepare.checks`)
    job           where checkpoints are saved, which steps are compared with serial training, what the trace records

All of this happens in the caller's process and does not change the caller's model or random state.
"""

from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import nn

from mpkit.common.exceptions import report
from mpkit.plan.plan import Plan
from mpkit.strategies.context.sequence import check_not_packed
from mpkit.strategies.data.batches import check_integer
from mpkit.strategies.job.feed import WholeBatches
from mpkit.strategies.job.job import Problem, Procedure, TrainJob
from mpkit.strategies.loss.counted import Quotient
from mpkit.strategies.models.chain import repeated_blocks
from mpkit.strategies.models.hooks import parameter_hooks
from mpkit.strategies.prepare.arguments import (
    TrainOptions,
    check_ema,
    check_loss,
    check_model,
    check_on_step,
    check_plan,
    check_surroundings,
    check_update,
    take_evaluation,
)
from mpkit.strategies.prepare.batches import check_split, is_stream, of_every_size, take_batches
from mpkit.strategies.prepare.checks import Task, check_global_hooks, find_rejection, raise_rejection
from mpkit.strategies.prepare.copies import ready_to_travel
from mpkit.strategies.prepare.isolation import on_threads, quiet
from mpkit.strategies.prepare.loss_form import find_loss_form
from mpkit.strategies.prepare.metadata import describe_run
from mpkit.strategies.prepare.optimizer import examine_optimizer
from mpkit.strategies.prepare.proof_steps import SpecialValues, check_verify, with_proof
from mpkit.strategies.prepare.resolve import resolve
from mpkit.strategies.prepare.resume import check_saving, facts_of, find_checkpoint, name_training, take_up
from mpkit.strategies.prepare.sample import SampleSeen, observe_sample
from mpkit.strategies.stage.recompute import chosen_blocks
from mpkit.strategies.update.optimizer import with_average

__all__ = ["TrainJob", "prepare", "warn_if_unwise"]


def prepare(
    model: nn.Module, data: Any, plan: Plan | None, *, ranks: int, by_name: bool = True, gpu: int | None = None,
    **options: Unpack[TrainOptions],
) -> TrainJob:  # fmt: skip
    """Check a training and prepare it for the ranks, or raise a ValueError that says why and what would work.

    Args:
        model: any module; it is not changed. `mpkit.strategies.prepare.partition` cuts those that are not a chain.
        data: a sequence of (inputs, targets), a DataLoader or a generator, of which `steps` batches are taken; or
            `mpkit.Batches` of a dataset. Inputs and targets are a tensor, a tuple or a dict of tensors, batch first.
        plan: how to train; None: `Plan.serial()`.
        by_name: whether messages between the ranks are matched by name; otherwise by order (nccl).
        gpu: the GPU on which the steps are verified; None: they are in the memory of this process.
    """
    # ---- arguments
    plan = Plan.serial() if plan is None else plan
    check_surroundings()
    check_model(model)
    check_plan(plan, ranks)
    loss, how = options["loss"], _procedure(options)
    verify = check_verify(options.get("verify", False))
    special = SpecialValues(loss)
    sent = ready_to_travel(model)
    # Generators are read with the caller's own random state, not a copy of it.
    data = take_batches(data, how.steps) if is_stream(data) else data
    # One core is left to the fork server, which imports torch while the first training is prepared.
    with quiet(), on_threads(torch.get_num_threads() - 1):
        batches = take_batches(data, how.steps)
        sizes = of_every_size(batches, how.steps)
        check_split(sizes, plan.__str__, plan.microbatches, plan.dp if plan.data_parallel == "dp" else 1)
        evaluation = take_evaluation(options.get("evaluate"), options.get("every"), sent)
        further = [] if evaluation is None else of_every_size(evaluation.batches, len(evaluation.batches))
        for inputs, _ in (*(batches if isinstance(batches, WholeBatches) else ()), *sizes, *further):
            check_not_packed(inputs, plan.cp)
        # ---- resolve
        exchanges = plan.cp * plan.tp * plan.ep > 1
        sample = observe_sample(sent, sizes[0], plan) if exchanges else SampleSeen()
        seen = Quotient(special)
        resolved = resolve(sent, [*sizes, *further], plan, seen, by_name=by_name)
        pairs, at_once = seen.count is not None, resolved.computes_loss_at_once
        form, nominal = find_loss_form(loss, batches, sizes[0], special.mean, pairs=pairs, at_once=at_once)
        # ---- checks
        task = Task(sent, model, sizes, isinstance(batches, WholeBatches), loss, counts=nominal is not None)
        raise_rejection(find_rejection(resolved, task))
        saves = any(options.get(n) is not None for n in ("checkpoint_every", "checkpoint_dir", "resume_from"))
        examined = examine_optimizer(
            how.optimizer, sent, model, plan, scheduled=how.lr_schedule is not None, saves=saves
        )
    # ---- job
    what = Problem(sent, batches, form, list(sent.state_dict()), nominal, parameter_hooks(model), loss)
    how = replace(how, facts=facts_of(sent, examined), evaluation=evaluation, by_owner=examined.whole)
    how = with_proof(_with_checkpoints(how, options), verify, what, sizes[0], resolved, special.found, gpu)
    meta = describe_run(sent, sizes[0], resolved, sample, by_owner=how.by_owner)
    return TrainJob(what, how, resolved, meta | _describe_job(what, how, plan))


def _procedure(options: TrainOptions) -> Procedure:
    """Return how the options ask to train, checked; without checkpoints and evaluation."""
    rates, norm = options.get("lr_schedule"), options.get("max_grad_norm")
    optimizer: Any = options["optimizer"]  # of any type until it is examined
    steps = check_integer("steps", options["steps"], 1, 3, most=2**31 - 1)
    seed = check_integer("seed", options.get("seed", 0), 0, 0)
    check_loss(options["loss"])
    check_update(norm, rates, steps)
    check_global_hooks()
    on_step, ema = check_on_step(options.get("on_step")), check_ema(options.get("ema"))
    if ema is not None and callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = with_average(optimizer, ema)
    return Procedure(optimizer, steps, seed, norm, rates, on_step=on_step, ema=ema)


def _with_checkpoints(how: Procedure, options: TrainOptions) -> Procedure:
    """Return the procedure with where checkpoints are saved, and the one from which it resumes."""
    every, folder, source = (options.get(n) for n in ("checkpoint_every", "checkpoint_dir", "resume_from"))
    saving = check_saving(every, folder, options.get("checkpoint_keep", 2))
    resume = None if source is None else take_up(find_checkpoint(source), how.facts, how.steps)
    return replace(how, saving=saving and name_training(saving, resume), resume=resume)


def _describe_job(what: Problem, how: Procedure, plan: Plan) -> dict[str, Any]:
    """Return what the trace records besides the plan."""
    blocks = repeated_blocks(what.model)
    meta = {
        "batch_size": what.batches.size(0),
        "steps": how.steps,
        "first_step": how.first_step,
        "seed": how.seed,
        "blocks": [len(chosen_blocks(plan.recompute, blocks)), len(blocks)],
    }
    if isinstance(what.batches, WholeBatches) and what.batches.read_in:
        meta["read_before"] = {"seconds": what.batches.read_in, "batches": len(what.batches)}
    return meta


def warn_if_unwise(plan: Plan) -> None:
    """Warn if a plan sends more than an equivalent one, and say what that costs.

    ZeRO-2 and -3 free gradients and parameters after each backward, and a pipeline has m backwards per step, so the
    volume sent grows with m. Rajbhandari et al. 2020, section 7.2, count one backward.
    """
    m = plan.microbatches
    if plan.pp == 1 or plan.dp * plan.cp == 1 or plan.zero < 2 or m == 1:
        return
    # Parameters are kept on the host in stage 3 only.
    cheaper = replace(plan, zero=1, offload="optimizer" if plan.offload == "params" else plan.offload)
    why = {
        2: f"reduces the gradients after each micro-batch's backward, (m + 1) psi per step with m = {m}",
        3: f"gathers the parameters for each micro-batch's forward and backward and reduces the gradients after, "
        f"3 m psi per step with m = {m}",
    }[plan.zero]
    report(
        f"{plan}: in a pipeline ZeRO-{plan.zero} {why}, where ZeRO-1 sends 2 psi. "
        f"Unless memory forces you, {cheaper}"
    )
