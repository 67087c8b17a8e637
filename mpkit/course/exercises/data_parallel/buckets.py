"""Buckets.

One flat buffer has to wait for the last gradient; one message a gradient pays the latency many times. DDP takes the
middle: **buckets** of a given size. Go through the parameters **from the last to the first**, as their gradients come
in the backward, and put each gradient into the open bucket. A bucket is closed as soon as it holds `bucket_bytes` **or
more**; the next gradient opens another. Each bucket is one flat tensor, and one all-reduce.

    parameters        0 ▂▂▂▂  1 ▂  2 ▂▂▂▂▂▂  3 ▂  4 ▂▂  5 ▂
    buckets, of ▂▂▂▂  [5 4 3]  [2]  [1 0]            sent in this order

Write what averages the gradients in buckets. Checked are the gradients, and the sizes of your all-reduces, in their
order. (The mean over ranks may be asked for with `op="mean"`.)

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.2.
"""

from __future__ import annotations

import torch
from torch import nn

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import collectives
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen
from mpkit.trace import Kind


# %% answer
def average_in_buckets(ctx: mk.Context, parameters: list[nn.Parameter], bucket_bytes: int) -> None:
    """Replace each `parameter.grad` by its mean over all ranks; one all-reduce per bucket, the last parameter first."""
    ### BEGIN SOLUTION
    buckets: list[list[nn.Parameter]] = []
    held = bucket_bytes  # bytes in the open bucket: none is open yet
    for parameter in reversed(parameters):
        if held >= bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(parameter)
        held += parameter.nbytes
    for bucket in buckets:
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
        ctx.comm.all_reduce(flat, op="mean")
        parts = flat.split([parameter.numel() for parameter in bucket])
        for parameter, part in zip(bucket, parts, strict=True):
            parameter.grad = part.view_as(parameter)
    ### END SOLUTION


# %% checks
WIDTHS = (6, 20, 9, 14, 5, 3)
SAMPLES = 12


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the gradients that the answer leaves after this rank's backward."""
    assert callable(answer)
    model = serial.model(case.seed, WIDTHS)
    x, y = serial.share(serial.batches(case, SAMPLES, 1)[0], ctx.rank, ctx.world_size)
    torch.autograd.backward(serial.mse(model(x), y))
    answer(ctx, list(model.parameters()), case["bucket_bytes"])
    return serial.gradients(model)


def expected(case: Case) -> list[object]:
    """Return the gradients of one backward over the whole batch."""
    model = serial.model(case.seed, WIDTHS)
    x, y = serial.batches(case, SAMPLES, 1)[0]
    torch.autograd.backward(serial.mse(model(x), y))
    return [serial.gradients(model)] * case.ranks


def sizes(case: Case) -> list[int]:
    """Return the bytes of the buckets, in their order."""
    totals: list[int] = []
    for parameter in reversed(list(serial.model(0, WIDTHS).parameters())):
        if not totals or totals[-1] >= case["bucket_bytes"]:
            totals.append(0)
        totals[-1] += parameter.nbytes
    return totals


def sent(seen: Seen) -> list[int]:
    """Return the bytes of rank 0's all-reduces, in their order."""
    assert seen.trace is not None
    ops = seen.trace.ranks[0].ops
    return [int(nbytes) for nbytes in ops["bytes"][ops["kind"] == Kind.ALL_REDUCE]]


def off(seen: Seen) -> float:
    """Return how many buckets do not have the size that the rule gives."""
    right, mine = sizes(seen.case), sent(seen)
    return sum(a != b for a, b in zip(right, mine, strict=False)) + abs(len(right) - len(mine))


EXERCISE = OnRanks(
    solution=average_in_buckets,
    cases=(
        Case(2, 1, {"bucket_bytes": 300}),
        Case(3, 2, {"bucket_bytes": 1200}),
        Case(4, 3, {"bucket_bytes": 1}),
        Case(2, 4, {"bucket_bytes": 10**6}),
        Case(2, 5, {"bucket_bytes": 144}),  # the bytes of the last layer: its bucket is just full
    ),
    play=play,
    expected=expected,
    result="gradients",
    budgets=(
        Budget("collectives", collectives, lambda case: len(sizes(case))),
        Budget(
            "largest bucket", lambda seen: max(sent(seen), default=0), lambda case: max(sizes(case)), "bytes"
        ),
        Budget("all-reduces that are not a bucket of the rule", off, 0),
    ),
    after="02-data-parallel",
    place=50,
    start="First make a list of lists of parameters, without communication: go through `reversed(parameters)`, and "
    "open a new list when the open one holds `bucket_bytes` or more. `parameter.nbytes` is what one holds.",
    mistakes=(
        Mistake(
            "forgets-the-last-bucket",
            (
                "Which parameters have the wrong gradient: those at the end of the model, or those at its beginning?",
                "The bucket that is open when the parameters run out is not full, and yet it has to be sent. The first "
                "layers' gradients are in it.",
            ),
            [
                (
                    "    for bucket in buckets:",
                    "    for bucket in buckets if held >= bucket_bytes else buckets[:-1]:",
                )
            ],
        ),
        Mistake(
            "one-bucket-for-all",
            (
                "How large is your largest bucket, and how large may one be?",
                "With one bucket there is nothing to send before the backward is over. Close a bucket as soon as it "
                "holds `bucket_bytes` or more, and open the next one.",
            ),
            [("        if held >= bucket_bytes:\n", "        if not buckets:\n")],
            when=lambda seen: seen.budget == "largest bucket" and len(sent(seen)) == 1,
        ),
        Mistake(
            "a-bucket-for-each-parameter",
            (
                "How many collectives did a rank call, and how many buckets should there be?",
                "A bucket holds several gradients: it is closed only once its bytes reach `bucket_bytes`. Are you "
                "counting bytes (`parameter.nbytes`), and adding them up?",
            ),
            [("held += parameter.nbytes", "held = bucket_bytes")],
            when=lambda seen: (
                seen.budget == "collectives"
                and len(sent(seen)) == len(list(serial.model(0, WIDTHS).parameters()))
            ),
        ),
        Mistake(
            "closes-when-there-is-more",
            (
                "One bucket holds exactly `bucket_bytes`. Is it closed?",
                "A bucket that holds `bucket_bytes` or more is closed: compare with `>=`, not with `>`.",
            ),
            [("if held >= bucket_bytes:", "if held > bucket_bytes or not buckets:")],
            when=lambda seen: seen.case["bucket_bytes"] == 144 and seen.budget,
        ),
        Mistake(
            "first-parameter-first",
            (
                "Which gradient comes first in the backward?",
                "The backward goes from the loss to the inputs: the last layer's gradients are there first. If the "
                "first bucket holds the first layer's, it is full only when all is over, and everybody waits for it.",
                "Go through `reversed(parameters)`.",
            ),
            [("in reversed(parameters)", "in parameters")],
        ),
        Mistake(
            "counts-elements-for-bytes",
            (
                "Your buckets are too large, all of them by about the same factor. In what do you measure?",
                "`bucket_bytes` is in bytes, `parameter.numel()` counts elements, of 8 bytes each here: "
                "`parameter.nbytes`.",
            ),
            [("held += parameter.nbytes", "held += parameter.numel()")],
        ),
        Mistake(
            "summed-not-averaged",
            (
                "By which factor are the gradients wrong, on 2 ranks and on 3?",
                "An all-reduce adds up; wanted is the mean over ranks.",
            ),
            [(', op="mean"', "")],
        ),
    ),
    otherwise=(
        "Print the buckets' sizes for one case, and work them out by hand: from the last parameter to the first, a "
        "bucket is closed by the gradient that makes it `bucket_bytes` or more.",
    ),
)
