"""Puzzles of time and memory.

You train one network for one step in eight ways: the whole batch on one device, one micro-batch after the other, three
ways to divide the batch over ranks, two pipelines, and all of it together. Each puzzle has a time target and a memory
target, and both are measured. Your function gets `layers`, and computes with its operations only (that no forward and
no backward is left out is checked as well):

    layers.count, layers.microbatches                    how many layers, and how many micro-batches in the whole batch

    weight, momentum = layers.load(i)                    layer i's, whole; load(i, part, parts): a part of the rows
    x = layers.inputs([0, 1])                            the inputs of micro-batches 0 and 1, one after the other
    x = layers.empty(2)                                  a tensor to receive what belongs to 2 micro-batches into
    y = layers.forward(i, x, weight)                     time 1 for each micro-batch in x
    dy = layers.loss(y, [0, 1])                          gradient of the last output, of the mean over the *whole* batch
    dweight, dx = layers.backward(i, x, dy, weight)      time 2 for each micro-batch; x is the input of the layer
    layers.update(i, weight, momentum, dweight)          in place; time 1/2 for a whole weight, less for a part

Ranks send with `ctx.comm`: a message takes 0.1; on n ranks an all-gather or a reduce-scatter 0.1 (n-1), an all-reduce
0.2 (n-1), as many hops as a ring has. Everything else takes no time.

Memory is the peak of the fullest rank, in activations of one micro-batch through one layer. A weight is 2, as are its
momentum and its gradient; activations and their gradients are 1 per micro-batch. Every tensor counts for as long as
anything refers to it: `del` what is not needed. (A reduce-scatter takes as much again as its input while it runs, and
an all-gather its result. What a collective uses can live on for a moment after it; the targets have room for that.)

Return the weights that the rank ends with, as a dict: `{i: weight}`. The training is compared with one device's.

Source: the eight tasks of Sasha Rush, "LLM Training Puzzles", 2023, in other words, with other costs and targets, on
real ranks.
"""

from __future__ import annotations

# %% given
from mpkit.course.framework.layers import Layers

# %% family
__all__ = ["PLACE", "TITLE", "Layers"]

TITLE = "Puzzles of time and memory"
PLACE = 12
