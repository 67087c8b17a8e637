"""What a program's libraries say of its strategy in one rank's file: evidence for `infer`."""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from typing import Any

import numpy as np

from mpkit.timeline.foreign.phases import recomputed_rows
from mpkit.timeline.foreign.reading.events import STEP, Events

__all__ = ["said_by"]

_FSDP = re.compile(r"FSDP::(all_gather|post_backward_reduce) \((.*)\)$")


def said_by(events: Events) -> dict[str, Any]:
    """Return, as JSON types, what annotations and operators say.

    ddp: how often `DistributedDataParallel.forward` was called; fsdp: by layer, how often FSDP2 gathers and reduces it;
    steps: profiled ones; optimizer: its class; recomputed: operators of a forward that run within backwards;
    redistributed: how often DTensor changes a layout; gradients: elements of each parameter in the order of the
    backward, of the last step, where shapes were recorded.
    """
    table = events["annotation"]
    words = Counter(events.names[number] for number in table.name.tolist())
    gathers: dict[str, int] = {}
    reduces: dict[str, int] = {}
    for word, count in words.items():
        if found := _FSDP.match(word):
            (gathers if found[1] == "all_gather" else reduces)[found[2]] = count
    on_host = [i for i, number in enumerate(table.name.tolist()) if STEP.match(events.names[number])]
    optimizers = [
        word[15:-5] for word in words if word.startswith("Optimizer.step#") and word.endswith(".step")
    ]
    redistributes = [number for number, name in enumerate(events.names) if name.endswith("Redistribute")]
    return {
        "ddp": words["DistributedDataParallel.forward"],
        "fsdp": {"gathers": gathers, "reduces": reduces},
        "pipeline": any(word.startswith("PP:") for word in words),
        "steps": len(on_host),
        "optimizer": optimizers[0] if optimizers else "",
        "recomputed": len(recomputed_rows(events)),
        "redistributed": int(np.isin(events["op"].name, redistributes).sum()),
        "gradients": _gradients(events, int(table.start[on_host[-1]]) if on_host else 0),
    }


def _gradients(events: Events, since: int) -> list[int]:
    """Return the elements of each gradient that is accumulated from this time on, each parameter once."""
    ops = events["op"]
    names = np.array([name == "torch::autograd::AccumulateGrad" for name in events.names] + [False])
    rows = np.flatnonzero(names[ops.name] & (ops.start >= since))
    rows = rows[np.argsort(ops.start[rows], kind="stable")]
    shapes = [(ops.args.get(row, {}).get("Input Dims") or [[]])[0] for row in rows.tolist()]
    return [
        prod(shape) for shape in shapes if shape and type(shape[0]) is int
    ]  # of a tensor, not of a list of some
