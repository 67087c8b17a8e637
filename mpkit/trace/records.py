"""What is recorded: the kinds of operations, the lanes that they run on, and the columns of a record."""

from enum import IntEnum

import numpy as np


class Lane(IntEnum):
    """The lanes of one device: what can happen on it at the same time."""

    COMPUTE = 0
    COMM = 1
    HOST = 2
    NONE = 3  # markers, such as a step; never drawn as work
    DATA = 4  # the rank gets its share of a batch and does nothing else meanwhile


class Kind(IntEnum):
    """The kind of an op. Its lower-case name is the word used in data frames and pictures."""

    # compute lane: the device is busy
    FORWARD = 1  # F
    BACKWARD = 2  # B
    INPUT_GRAD = 3  # I: the half of the backward that the previous stage waits for
    WEIGHT_GRAD = 4  # W: the other half
    OPTIMIZER = 5
    RECOMPUTE = 6
    COMPUTE = 7  # anything else that computes, such as a learner's own span
    # compute lane: the device is idle
    WAIT = 16  # until the op `ref` is finished
    # comm lane
    SEND = 32
    RECV = 33
    ALL_REDUCE = 34
    ALL_GATHER = 35
    REDUCE_SCATTER = 36
    BROADCAST = 37
    REDUCE = 38
    SCATTER = 39
    GATHER = 40
    ALL_TO_ALL = 41
    BARRIER = 42
    # host lane: copies between device and host
    COPY_TO_DEVICE = 64
    COPY_TO_HOST = 65
    # data lane
    DATA = 96  # reading, collating and copying samples, or waiting for workers or the caller's process
    # no lane
    STEP = 128  # one training step; `value` is its loss, on the ranks that know it

    @property
    def word(self) -> str:
        """The kind as data frames and pictures spell it, such as "all_reduce"."""
        return self.name.lower()


def lane_of(kind: int) -> Lane:
    """Return the lane on which an op of this kind runs.

    >>> lane_of(Kind.ALL_REDUCE).name
    'COMM'
    """
    if kind < 32:
        return Lane.COMPUTE
    if kind < 64:
        return Lane.COMM
    if kind < 96:
        return Lane.HOST
    return Lane.DATA if kind < 128 else Lane.NONE


LAYER = "layer "
"""Prefix of the names of communications that send parameters or gradients of one layer, in a training."""

CATEGORIES = ("params", "grads", "optimizer", "activations", "buffers")
"""What memory holds. A MEMORY record's `category` is an index into these."""

HEADER = np.dtype(
    [("magic", "S8"), ("count", "<u8"), ("state", "<u8"), ("check", "<u8"), ("names", "<u8"), ("pad", "V24")]
)
"""64 bytes. `count`: the number of complete records. `state`: 0 running, 1 finished, 2 failed.

`check` and `names` are written when the rank ends; 0 before: 2^32 plus the CRC-32 of the records, and 2^32 times the
length of the names plus theirs.
"""

OP = np.dtype(
    [
        ("kind", "u1"),
        ("lane", "u1"),
        ("depth", "u1"),  # 0: an action; 1 and more: a layer inside it, not counted again
        ("flags", "u1"),  # 0
        ("stage", "<i2"),  # -1: none
        ("pad", "<i2"),
        ("microbatch", "<i4"),  # -1: none
        ("step", "<i4"),  # -1: outside of any step
        # Lines of rank*.names; line 0 is "". `where` is the code that issued the op, "file.py:12 in function";
        # `group` is "0,1,2,3" for a collective, "0>1#tag" for a message.
        ("name", "<u4"),
        ("where", "<u4"),
        ("group", "<u4"),
        ("number", "<i4"),  # the n-th op of its group (or of its src, dst and tag), from 0; -1: none
        ("peer", "<i4"),  # the other end of a message or the root of a collective, as a global rank; -1
        ("ref", "<i4"),  # WAIT: index of the op waited for; -1
        # ns of the machine's monotonic clock. Communication starts when issued and ends when seen to be complete.
        ("start", "<i8"),
        ("end", "<i8"),  # 0 while the op is open
        # Nanoseconds of CPU time that the rank's thread used meanwhile, for compute ops other than WAIT.
        (
            "cpu",
            "<i8",
        ),
        ("bytes", "<i8"),  # payload of a communication or copy; bytes that a compute op touches, 0 if unknown
        ("flops", "<f8"),  # for a compute op, 0 if unknown
        # An action imported from a GPU: the seconds in which it stood still since its host had launched nothing.
        ("value", "<f8"),  # STEP: the loss, nan if unknown; a played compute op: the number of its operators
    ]
)
"""88 bytes per op."""

MEMORY = np.dtype(
    [
        ("time", "<i8"),  # ns, as in OP
        ("op", "<u4"),  # ops begun on this rank before the change: it happened in or after op - 1
        ("category", "u1"),
        ("pad", "V3"),
        ("delta", "<i8"),  # bytes
    ]
)

TIMED_BY_EVENTS = ("cuda", "xpu", "hpu")
"""The kinds of devices whose ops are timed by events in their streams; those of others are timed by the host."""

VALUE = np.dtype(
    [
        ("time", "<i8"),  # ns, as in OP
        ("step", "<i4"),
        ("name", "<u4"),  # a line of rank*.names: the metric's name, or the reason for a stop
        ("value", "<f8"),  # nan for a stop
        # 0: a metric; 1: this rank asked to stop the training after this step; 2: rows of an expert; 3: attended pairs
        ("kind", "u1"),
        ("pad", "V7"),
    ]
)
"""32 bytes per value that a function of the user's logged."""

SENT_PART = np.dtype(
    [
        ("op", "<u4"),  # the index of an all-to-all of uneven parts among the rank's ops
        ("member", "<u4"),  # to whom: the place of a rank in the group, from 0; also this rank's own
        ("bytes", "<i8"),  # more than 0; all parts of a call add up to its payload
    ]
)
"""16 bytes per part that an all-to-all sends."""

SAMPLE = np.dtype(
    [
        ("time", "<i8"),  # ns, as in OP
        # Of the GPU that the rank is on, whoever uses it; nan where the GPU or its driver does not tell.
        ("utilisation", "<f8"),  # % of the driver's last sample period in which a kernel ran
        ("memory", "<f8"),  # bytes in use
    ]
)
"""24 bytes per sample of a GPU, which the process that watches the run takes."""

MAGIC = {"ops": b"MPKOPS01", "mem": b"MPKMEM01", "log": b"MPKLOG01", "gpu": b"MPKGPU02", "sent": b"MPKSNT01"}
