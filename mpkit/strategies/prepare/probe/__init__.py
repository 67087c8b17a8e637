"""The probe: check that a batch is the sum of its parts for a model, a loss and a plan.

Micro-batches and replicas each compute a part of a batch, and their results are combined. The combination equals the
batch's loss and gradient if the loss is a mean over samples (or returns (total, count)), and if no layer mixes samples.
Both conditions are tested here with real computation on a few samples of the first batch, all at once and in parts.

    trial            run model and loss on some samples, all at once or in parts; `draws`: without randomness
    compare          whether two results are the same up to rounding
    parts            which samples are tried, and in which parts
    masked_targets   data in which some targets do not count
    explain          the loss or the layer to which a difference is due; `messages`: in words
    verdict          the outcome, and the loss that ranks will use
"""

from mpkit.strategies.prepare.probe.verdict import check_parts, check_whole_batch_loss

__all__ = ["check_parts", "check_whole_batch_loss"]
