"""The probe: is a batch the sum of its parts, for this model, this loss and this plan?

Micro-batches and replicas each compute a part of a batch, and what they find is put together. That is the batch's loss
and gradient if the loss is a mean over samples (or says how it adds up), and if no layer looks at other samples. Both
are tried here, for real, on a few samples of the first batch, all at once and in parts.

    trial      model and loss on some samples, all at once or in parts; `draws`: without randomness
    compare    are they the same, but for rounding?
    parts      which samples are tried, and in which parts
    masks      data in which some targets do not count
    layers     which layer looks at the batch
    verdict    which of these it is, and what becomes of the loss
    words      what is said
"""

from mpkit.prepare.probe.verdict import Objective, flops_of_a_sample, objective

__all__ = ["Objective", "flops_of_a_sample", "objective"]
