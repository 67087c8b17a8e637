"""How ranks call the loss of a part of the batch: as a mean over samples, or as (total, count).

A loss that is one call of a mean of torch.nn.functional is called as (total, count) wherever the parts of a batch may
count differently (ignored targets, class weights), so the user's plain `F.cross_entropy` is right in any plan.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpkit.common.exceptions import one_line, report
from mpkit.common.torch_private import FakeTensor, tree_map_only
from mpkit.strategies.data.microbatch import Value, batch_size, leaves, map_tensors
from mpkit.strategies.loss.counted import INDEXED, MeanLoss, Quotient, SummedMeans, nominal_count
from mpkit.strategies.loss.whole_batch import WholeBatchLoss
from mpkit.strategies.packing.packing import dumps
from mpkit.strategies.tensor.vocabulary import DividedLogits

Loss = Callable[[Any, Any], Any]

BY_SAMPLE = (F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss)
"""Means over samples, whose targets have another shape than the outputs."""


@dataclass(frozen=True)
class OneMean:
    """A loss that is one call of a mean of torch.nn.functional."""

    per_sample: bool  # it certainly divides by as much for each sample, whatever the targets' values
    ignored: int | None  # the value of targets that do not count, if that is all that may differ
    place: int  # the index among the targets of the tensor that it looks at

    def is_over_samples(self, batches: Any) -> bool:
        """Return whether it is a mean over samples for all batches; only a list of them can be inspected.

        Targets without content, of a dry run, all count.
        """
        if self.per_sample or self.ignored is None or not isinstance(batches, list):
            return self.per_sample
        targets = (leaves(batch)[self.place] for _, batch in batches)
        known = (each for each in targets if not isinstance(each, FakeTensor))
        return not any(bool((each == self.ignored).any()) for each in known)


def find_mean(loss: Loss, outputs: Any, targets: Value) -> OneMean | None:
    """Return what is known of a loss that is one call of a mean of torch.nn.functional; None if it is something else.

    What the loss remembers changes, so it is given a copy (`copy_loss`).

    >>> import torch
    >>> find_mean(torch.nn.functional.mse_loss, torch.zeros(4, 2), torch.zeros(4, 2))
    OneMean(per_sample=True, ignored=None, place=0)
    """
    if isinstance(loss, WholeBatchLoss):
        return None
    targets = map_tensors(Tensor.contiguous, targets)  # so that a loss that flattens them makes a view
    # The training does not communicate here: divided logits become whole ones.
    outputs = tree_map_only(
        DividedLogits, lambda t: torch.zeros(t.shape, dtype=t.dtype, device=t.device), outputs
    )
    with SummedMeans() as reduced:
        try:
            value = loss(outputs, targets)
        except Exception as error:  # the user's loss, given a sum where it expects a mean
            report(
                "Whether the loss is one call of a mean of torch's is not known: with a sum in place of each mean it "
                f"raises {one_line(error)}. So it counts as a mean over samples, which the steps that are compared "
                "with serial training check."
            )
            return None
    call = next((call for call in reduced.calls if call[0] is value), None)
    if call is None:
        return None
    func, given = call[2:]
    target = given.get("target")
    place = _place(target, targets)
    if place is None or not isinstance(target, Tensor):
        return OneMean(False, None, 0)
    if func not in INDEXED:
        alike = target.shape == getattr(given.get("input"), "shape", target.shape)
        samples = given["reduction"] == "batchmean" or alike or func in BY_SAMPLE
        return OneMean(samples, None, place)
    if target.is_floating_point():
        return OneMean(True, None, place)
    return OneMean(False, given["ignore_index"] if given["weight"] is None else None, place)


def find_loss_form(
    loss: Loss, batches: Any, batch: tuple[Value, Value], mean: OneMean | None, *, pairs: bool, at_once: bool
) -> tuple[Loss, float | None]:
    """Return the loss as ranks call it, and the number near the count of a batch by which they divide totals.

    Args:
        batch: the first one.
        pairs: whether the loss returned (total, count) in the dry run.
        at_once: whether one rank computes the loss of all samples of a batch at once.
    """
    if at_once:
        return (loss.fn if isinstance(loss, MeanLoss) else Quotient(loss) if pairs else loss), None
    counted = max((leaf.numel() for leaf in leaves(batch[1])), default=batch_size(batch[0]))
    if pairs or isinstance(loss, MeanLoss):
        return loss, nominal_count(counted)
    if mean is None or mean.is_over_samples(batches):
        return loss, None
    return MeanLoss(loss), nominal_count(counted)


def _place(target: Any, targets: Value) -> int | None:
    """Return the index of the target tensor that the loss was called with as a whole, in whatever shape."""
    for place, leaf in enumerate(leaves(targets)):
        same = isinstance(target, Tensor) and target.untyped_storage()._cdata == leaf.untyped_storage()._cdata
        if same and target.numel() == leaf.numel() and target.dtype == leaf.dtype:
            return place
    return None


def copy_loss(loss: Loss) -> Loss:
    """Return a copy of the loss as a rank receives it, so that what the original remembers does not change."""
    try:
        copy: Loss = pickle.loads(dumps(loss))
    except Exception as error:
        raise ValueError(
            f"The loss cannot be sent to the ranks: {one_line(error)}. Locks, open files, generators and the like "
            "belong to this process: make them when the loss is first called, or leave them out (__getstate__)."
        ) from None
    return copy
