"""What each rank's all-to-alls of uneven parts sent to whom, beside the spans of a timeline."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline.replay.spans import PART_SENT, NameLines

__all__ = ["read_sent_parts"]

Array = npt.NDArray[Any]


def read_sent_parts(rank: int, parts: Array, ops: Array, lines: NameLines) -> Array:
    """Return (n,) of `PART_SENT`: (n,) of `SENT_PART` without those of ops that are not complete.

    Args:
        rank: who sends.
        parts: what its all-to-alls send.
        ops: (m,) of `OP`, as far as they are known.
        lines: the numbers of its names in the timeline.
    """
    parts = parts[parts["op"] < len(ops)]
    parts = parts[ops["end"][parts["op"]] != 0]
    of = ops[parts["op"]]
    found = np.zeros(len(parts), PART_SENT)
    found["rank"], found["step"], found["group"] = rank, of["step"], lines[of["group"]]
    found["member"], found["bytes"] = parts["member"], parts["bytes"]
    return found
