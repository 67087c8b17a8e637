"""A micro-batch's share of the loss of the batch, in fp32 at least."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpkit.strategies.data.microbatch import Value
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.loss.quotient import shares
from mpkit.strategies.loss.whole_batch import WholeBatchLoss
from mpkit.strategies.stage.stage import cast

__all__ = ["loss_share"]


def loss_share(job: TrainJob, output: Any, targets: Value, weight: float) -> tuple[Tensor, ...]:
    """Return a micro-batch's share of the loss, and its count where the loss has one
    (`mpkit.strategies.loss.quotient.shares`).

    Args:
        job: read for the loss and the precision.
        output: the model's output.
        targets: the targets, on the output's device.
        weight: the micro-batch's share of the samples; 0 for a stand-in, which does not count.
    """
    if job.plan.precision != "full":
        output = cast(output, torch.float32)  # a loss is a long sum, for which 16 bits are too few
    if isinstance(job.what.loss, WholeBatchLoss):
        loss = job.what.loss(output, targets, counts=weight > 0)
    else:
        loss = job.what.loss(output, targets)
    return shares(loss, weight, job.what.nominal)
