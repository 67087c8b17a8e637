"""The probe: model and loss on a few samples, all at once and in the parts of the plan.

What is too large, or fails on a few samples, is left to the proof of the run.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpkit.common.exceptions import one_line
from mpkit.strategies.data.microbatch import batch_size, part
from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.loss.mean import MeanLoss
from mpkit.strategies.loss.quotient import nominal_count
from mpkit.strategies.loss.whole_batch import WholeBatchLoss
from mpkit.strategies.models.nested_values import flatten
from mpkit.strategies.packing.packing import dumps
from mpkit.strategies.prepare.arguments.task import ProbedLoss, Rejection, Task
from mpkit.strategies.prepare.probe.buffers import check_buffers
from mpkit.strategies.prepare.probe.compare import differ
from mpkit.strategies.prepare.probe.explain import explain
from mpkit.strategies.prepare.probe.masked_targets import try_masked
from mpkit.strategies.prepare.probe.mean_loss import MeanLossDetector
from mpkit.strategies.prepare.probe.parts import Parts, division, scatter_samples
from mpkit.strategies.prepare.probe.sequences import check_sequence_loss
from mpkit.strategies.prepare.probe.trial import ProbeResult, ProbeTrial

__all__ = ["MOST", "Probe", "TrialFailure", "copy_loss", "of_samples"]

Loss = Callable[[Any, Any], Any]

MOST = 2e12
"""The most FLOPs of a probe: more would delay the start of a training on a few cores by minutes."""


class TrialFailure(Exception):
    """The model or the loss fails on parts of a batch; `__cause__` is the error."""


class Probe:
    """The trial of one training.

    Args:
        resolved: the plan, which determines the parts, and its FLOPs, which determine how many samples are tried.
        task: what is to be trained.
        plain: the loss as ranks call it if the probe finds nothing.
        whole: try the whole batch, whatever it costs.
    """

    def __init__(self, resolved: ResolvedPlan, task: Task, plain: ProbedLoss, *, whole: bool = False) -> None:
        self.resolved, self.plan, self.task, self.plain = resolved, resolved.plan, task, plain
        plan, first, self.loss = resolved.plan, task.batch, plain.loss
        self.size, self.of_a_sample = batch_size(first[0]), resolved.flops_of_a_sample()
        wanted, micro, replicas = division(self.size, plan.microbatches, plan.dp, self.of_a_sample)
        if whole:
            wanted, micro, replicas = self.size, plan.microbatches, plan.dp
        self.all = [list(range(wanted))]
        self.parts = scatter_samples(wanted, micro, replicas)
        self.data = part(first[0], slice(wanted)), part(first[1], slice(wanted))
        self.trial = ProbeTrial(task.model, copy_loss(self.loss), self.data)
        # Rank 0 of DP, and a loss of the whole batch, see the outputs of all replicas.
        self.gathers = (plan.dp > 1 and plan.data_parallel == "dp") or isinstance(self.loss, WholeBatchLoss)
        self.of_loss = scatter_samples(wanted, micro, 1) if self.gathers else self.parts

    def verdict(self) -> ProbedLoss:
        """Try model and loss, and return the resulting objective."""
        if 6 * self.of_a_sample * len(self.all[0]) > MOST:
            return self.plain
        heard = MeanLossDetector(self.trial.loss)
        try:
            whole = self._hear(heard)
        except TrialFailure:
            return self._try_whole_batch() or self.plain
        objective = self._form(heard, whole)
        # ---- the model, and the loss of it
        first, split = None, None
        try:
            if len(self.of_loss) > 1:
                first, split = self._check(self.trial, self.of_loss, whole)
            judged = first, split
            if self.gathers:
                first, split = self._check(self.trial.with_loss(of_samples), self.parts)
        except TrialFailure:
            return self._try_whole_batch() or objective
        if self.plan.cp > 1:
            check_sequence_loss(self.plan, self.trial.loss, whole.outputs[0], self.data[1])
        # ---- other data that the loss may meet
        if first is None or split is None:  # unknown
            return objective
        if (
            objective.nominal is None
            and heard.pair is None
            and judged[0] is not None
            and judged[1] is not None
        ):
            at_once, apart = (self.all, judged[0].outputs), (self.of_loss, judged[1].outputs)
            guarded = try_masked(self.plan, self.trial, self.loss, self.task.batches, at_once, apart)
            objective = objective._replace(loss=guarded) if guarded is not None else objective
        check_buffers(self, first, split)
        return objective

    def _hear(self, heard: MeanLossDetector) -> ProbeResult:
        """Return the result for all samples at once, with what this loss hears.

        Raises:
            TrialFailure: the model or the loss fails.
        """
        hearing = self.trial if isinstance(self.loss, WholeBatchLoss) else self.trial.with_loss(heard)
        try:
            whole = hearing.run(self.all, gradients=True)
        except Exception as error:  # perhaps since there are fewer samples than in the dry run
            raise TrialFailure from error
        self.trial.still = hearing.still
        return whole

    def _try_whole_batch(self) -> ProbedLoss | None:
        """Try the whole batch, on which the dry run has succeeded, unless that is too expensive."""
        if len(self.all[0]) == self.size or 6 * self.of_a_sample * self.size > MOST:
            return None
        return Probe(self.resolved, self.task, self.plain, whole=True).verdict()

    def _form(self, heard: MeanLossDetector, whole: ProbeResult) -> ProbedLoss:
        """Return how a rank calls the loss.

        A mean of torch's in which targets may not count is called as (total, count).
        """
        count = None if whole.count is None else whole.count * self.size / len(self.all[0])
        if self.plain.nominal is not None and count is not None:
            return self.plain._replace(nominal=nominal_count(count))
        if heard.pair is None or self.resolved.computes_loss_at_once or heard.constant(self.task.batches):
            return self.plain
        self.trial = self.trial.with_loss(MeanLoss(self.trial.loss))
        assert count is not None
        return ProbedLoss(MeanLoss(self.loss), nominal_count(count))

    def _check(
        self, trial: ProbeTrial, parts: Parts, whole: ProbeResult | None = None
    ) -> tuple[ProbeResult, ProbeResult]:
        """Check that loss and gradients of all samples equal those of the parts.

        Args:
            trial: the trial of model and loss.
            parts: the parts of the samples.
            whole: the result for all samples at once, if it is known already.

        Returns:
            The result for all samples at once, and that of the parts.

        Raises:
            Rejection: they differ.
            TrialFailure: the model or the loss fails on the parts.
        """

        def run_both(tried: ProbeTrial) -> tuple[ProbeResult, ProbeResult]:
            return tried.run(self.all, gradients=True), tried.run(parts, gradients=True)

        try:
            known = None if whole is None else (whole, trial.run(parts, gradients=True))
            before, after, differs = differ(trial, run_both, known)
        except Exception as error:  # perhaps parts of a size that the dry run did not have
            raise TrialFailure from error
        whole, split = before, after
        if differs and not trial.still:  # it draws from its own generator
            trial = trial.without_randomness()
            whole, split, differs = differ(trial, run_both)
        if differs and not trial.repeats(self.all):  # draws that are not torch's: try without any
            trial = trial.with_evaluation()
            whole, split, differs = differ(trial, run_both)
        if differs:
            raise Rejection(explain(self.plan, trial, whole, split, parts, self.size))
        return before, after


def copy_loss(loss: Loss) -> Loss:
    """Return a copy of the loss as a rank receives it, so that the state of the original does not change.

    Raises:
        Rejection: it cannot be sent to a rank.
    """
    try:
        copy: Loss = pickle.loads(dumps(loss))
    except Exception as error:
        raise Rejection(
            f"The loss cannot be sent to the ranks: {one_line(error)}. Locks, open files, generators and the like "
            "belong to this process: make them when the loss is first called, or leave them out (__getstate__)."
        ) from None
    return copy


def of_samples(outputs: Any, targets: Any) -> Tensor:
    """Return a mean over samples that depends on each element of the outputs with a different weight."""
    means = []
    for leaf in flatten(outputs)[0]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            rows = leaf.reshape(leaf.shape[0], -1) if leaf.dim() else leaf.reshape(1, 1)
            means.append((rows * torch.arange(1.0, 1 + rows.shape[1]).cos().to(rows)).mean(0).sum())
    return sum(means[1:], means[0])
