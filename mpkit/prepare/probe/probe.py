"""The probe: model and loss on a few samples, all at once and in the parts of the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor, nn

from mpkit.data.microbatch import Value, batch_size, part
from mpkit.loss.guard import Guarded, Masked
from mpkit.loss.mean import MeanLoss
from mpkit.loss.quotient import nominal_count
from mpkit.loss.whole_batch import WholeBatchLoss
from mpkit.models.nested import flatten
from mpkit.plan.plan import Plan
from mpkit.prepare.arguments.arguments import one_line
from mpkit.prepare.probe.buffers import check_buffers
from mpkit.prepare.probe.compare import ROUNDING, are_apart, differ
from mpkit.prepare.probe.explain import explain
from mpkit.prepare.probe.heard import Heard
from mpkit.prepare.probe.masks import variants
from mpkit.prepare.probe.parts import Parts, dealt, division
from mpkit.prepare.probe.sequences import check_sequence_loss
from mpkit.prepare.probe.trial import Found, Trial
from mpkit.prepare.probe.words import for_masked, for_model_loss

__all__ = [
    "MOST",
    "TOO_LARGE",
    "UNTRIED",
    "Loss",
    "Objective",
    "Probe",
    "Untried",
    "copied",
    "in_one_part",
    "of_samples",
    "untried",
]


Loss = Callable[[Any, Any], Any]


MOST = 2e12
"""FLOPs of a probe that takes about a minute on two cores."""


TOO_LARGE = (
    "The model is too large to be tried on a few samples before the ranks start, as smaller ones are: nobody has "
    "looked whether its loss or its layers look at other samples of a batch. Try a smaller one of its kind with it."
)


UNTRIED = (
    "Model and loss could not be tried on samples of the first batch before the ranks start ({}): nobody has looked "
    "whether the loss, or a layer, looks at other samples of a batch."
)


class Untried(Exception):
    """The model or the loss fails on parts of a batch; `__cause__` is the error."""


class Objective(NamedTuple):
    """The loss that is trained.

    Attributes:
        loss: the loss as a rank calls it.
        nominal: as in `Problem`.
        warnings: messages about what works but the user should know.
    """

    loss: Loss
    nominal: float | None
    warnings: tuple[str, ...] = ()


def in_one_part(plan: Plan) -> bool:
    """Return whether one rank computes the loss of all samples at once."""
    return plan.microbatches == 1 and plan.cp == 1 and (plan.dp == 1 or plan.data_parallel == "dp")


class Probe:
    """The trial of one training.

    Args:
        model, loss, batches, first: as in `objective`.
        plan: the plan, which determines the parts.
        flops: the FLOPs of the forward of one sample.
        plain: the objective if the probe finds nothing.
        whole: try the whole batch, whatever it costs.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Any,
        first: tuple[Value, Value],
        plan: Plan,
        flops: float,
        plain: Objective,
        *,
        whole: bool = False,
    ) -> None:
        self.model, self.loss, self.batches, self.plan, self.plain = model, loss, batches, plan, plain
        self.size, self.of_a_sample = batch_size(first[0]), flops
        wanted, micro, replicas = division(self.size, plan, flops)
        if whole:
            wanted, micro, replicas = self.size, plan.microbatches, plan.dp
        self.first = first
        self.all = [list(range(wanted))]
        self.parts = dealt(wanted, micro, replicas)
        self.data = part(first[0], slice(wanted)), part(first[1], slice(wanted))
        self.trial = Trial(model, copied(loss), self.data)
        # Rank 0 of DP, and a loss of the whole batch, see the outputs of all replicas.
        self.gathers = (plan.dp > 1 and plan.data_parallel == "dp") or isinstance(loss, WholeBatchLoss)
        self.of_loss = dealt(wanted, micro, 1) if self.gathers else self.parts

    def verdict(self) -> Objective:
        """Try model and loss, and return the resulting objective."""
        if 6 * self.of_a_sample * len(self.all[0]) > MOST:
            return self.plain._replace(warnings=(TOO_LARGE,))
        heard = Heard(self.trial.loss)
        try:
            hearing = self.trial if isinstance(self.loss, WholeBatchLoss) else self.trial.with_loss(heard)
            whole = hearing.run(self.all, gradients=True)
            self.trial.still = hearing.still
        except Exception as error:  # perhaps since there are fewer samples than in the dry run
            return self._again() or self.plain._replace(warnings=(untried(error),))
        found = self._form(heard, whole)
        # ---- the model, and the loss of it
        first, split = None, None
        try:
            if len(self.of_loss) > 1:
                first, split = self._check(self.trial, self.of_loss, whole)
            judged = first, split
            if self.gathers:
                first, split = self._check(self.trial.with_loss(of_samples), self.parts)
        except Untried as error:
            return self._again() or found._replace(warnings=(untried(error.__cause__ or error),))
        if self.plan.cp > 1:
            check_sequence_loss(self.plan, self.trial.loss, whole.outputs[0], self.data[1])
        # ---- other data that the loss may meet
        if first is None or split is None:  # unknown
            return found
        if found.nominal is None and heard.pair is None and judged[0] is not None and judged[1] is not None:
            found = self._masks(found, [judged[0].outputs, judged[1].outputs])
        warned = check_buffers(self.trial, self.all, self.parts, self.plan, (first.buffers, split.buffers))
        return found._replace(warnings=tuple(warned))

    def _again(self) -> Objective | None:
        """Try the whole batch, on which the dry run has succeeded, unless that is too expensive."""
        if len(self.all[0]) == self.size or 6 * self.of_a_sample * self.size > MOST:
            return None
        again = Probe(
            self.model,
            self.loss,
            self.batches,
            self.first,
            self.plan,
            self.of_a_sample,
            self.plain,
            whole=True,
        )
        return again.verdict()

    def _form(self, heard: Heard, whole: Found) -> Objective:
        """Return how a rank calls the loss.

        A mean of torch's in which targets may not count is called as (total, count).
        """
        count = None if whole.count is None else whole.count * self.size / len(self.all[0])
        if self.plain.nominal is not None and count is not None:
            return self.plain._replace(nominal=nominal_count(count))
        if heard.pair is None or in_one_part(self.plan) or heard.constant(self.batches):
            return self.plain
        self.trial = self.trial.with_loss(MeanLoss(self.trial.loss))
        assert count is not None
        return Objective(MeanLoss(self.loss), nominal_count(count))

    def _check(self, trial: Trial, parts: Parts, whole: Found | None = None) -> tuple[Found, Found]:
        """Check that loss and gradients of all samples equal those of the parts.

        Args:
            trial: the trial of model and loss.
            parts: the parts of the samples.
            whole: the result for all samples at once, if it is known already.

        Returns:
            The result for all samples at once, and that of the parts.

        Raises:
            ValueError: they differ.
            Untried: the model or the loss fails on the parts.
        """

        def compared(tried: Trial) -> tuple[Found, Found]:
            return tried.run(self.all, gradients=True), tried.run(parts, gradients=True)

        try:
            known = None if whole is None else (whole, trial.run(parts, gradients=True))
            before, after, differs = differ(trial, compared, known)
        except Exception as error:  # perhaps parts of a size that the dry run did not have
            raise Untried from error
        whole, split = before, after
        if differs and not trial.still:  # it draws from its own generator
            trial = trial.stilled()
            whole, split, differs = differ(trial, compared)
        if differs and not trial.repeats(self.all):  # draws that are not torch's: try without any
            trial = trial.evaluating()
            whole, split, differs = differ(trial, compared)
        if differs:
            raise ValueError(explain(self.plan, trial, whole, split, parts, self.size))
        return before, after

    def _masks(self, found: Objective, outputs: list[list[Any]]) -> Objective:
        """Try data in which some targets do not count; where that matters, look for such targets in the data.

        Args:
            found: the objective so far.
            outputs: the outputs of the model, for all samples and for each part.

        Raises:
            ValueError: the data has such targets.
        """
        minding: list[Masked] = []
        for variant in variants(self.loss, self.data):
            if variant.masked in minding:
                continue
            tried = self.trial.of(variant.data)
            try:
                if variant.masked.side == 1:  # targets, which the model does not see
                    at_once, apart = (
                        tried.of_outputs(made, parts)
                        for made, parts in zip(outputs, (self.all, self.of_loss), strict=True)
                    )
                    differs = are_apart(at_once, apart, 8 * ROUNDING)
                else:
                    differs = differ(tried, lambda t: (t.run(self.all), t.run(self.of_loss)))[2]
            except Exception:  # the loss or the model refuses such data, and will on the ranks too
                continue
            if differs:
                minding.append(variant.masked)
        if not minding:
            return found
        say = for_model_loss if any(masked.side == 0 for masked in minding) else for_masked
        if not isinstance(self.batches, list):
            message = say(self.plan, minding[0].number, "such came in this micro-batch")
            return found._replace(loss=Guarded(self.loss, minding, message))
        for i, (inputs, targets) in enumerate(self.batches):
            for masked in minding:
                if masked.uneven(inputs, targets):
                    raise ValueError(say(self.plan, masked.number, f"data[{i}] has such"))
        return found


def untried(error: BaseException) -> str:
    """Return the warning for a model or a loss that failed in its trial."""
    return UNTRIED.format(one_line(error))


def copied(loss: Loss) -> Loss:
    """Return a copy of the loss as a rank receives it, so that the state of the original does not change."""
    try:
        found: Loss = cloudpickle.loads(cloudpickle.dumps(loss))
    except Exception:  # it cannot be sent to the ranks either; that error says why
        return loss
    return found


def of_samples(outputs: Any, targets: Any) -> Tensor:
    """Return a mean over samples that depends on each element of the outputs with a different weight."""
    found = []
    for leaf in flatten(outputs)[0]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            rows = leaf.reshape(leaf.shape[0], -1) if leaf.dim() else leaf.reshape(1, 1)
            found.append((rows * torch.arange(1.0, 1 + rows.shape[1]).cos().to(rows)).mean(0).sum())
    return sum(found[1:], found[0])
