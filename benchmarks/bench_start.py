"""The first training of a fresh process: until `train` returns, and until the first operation is recorded.

Each turn is a new Python process, timed from just after `import torch, mpkit`: the model, the data, the Cluster, and
`train` at once, so that nothing is imported in pauses. "Warm" is a second training in the same process.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

ROUNDS = 5

SCRIPT = """
import json, time
import torch
import mpkit as mk

def times(cluster, begin):
    run = cluster.train(model, data, mk.Plan.gpipe(4, 8), loss=next_token_loss, optimizer=torch.optim.AdamW, steps=20)
    returned = time.monotonic()
    run.wait()
    first = min(int(rank.ops["start"].min()) for rank in run.trace.ranks) / 1e9
    return [returned - begin, first - begin]

begin = time.monotonic()
from mpkit.data import text_batches
from mpkit.models import GPT, next_token_loss
model, data = GPT(layers=4, width=64), text_batches(batch=32, length=32, steps=20)
with mk.Cluster(ranks=4, device="cpu") as cluster:
    fresh = times(cluster, begin)
    print(json.dumps([fresh, times(cluster, time.monotonic())]))
"""


def _turn() -> list[list[float]]:
    """Return (returned, first operation) in seconds, of the first and of the second training."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True)
    times: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return times


def measure() -> list[dict[str, Any]]:
    """Measure medians over fresh processes, in seconds, beside those of a second training."""
    turns = [_turn() for _ in range(ROUNDS)]
    rows = []
    for i, what in enumerate(("train returns", "the first operation is recorded")):
        fresh, warm = (statistics.median(turn[which][i] for turn in turns) for which in (0, 1))
        rows.append(
            {
                "name": f"start: fresh process until {what}",
                "value": fresh,
                "unit": "s",
                "ratio": fresh / warm,
                "against": f"times the second training ({warm:.3g} s)",
            }
        )
    return rows
