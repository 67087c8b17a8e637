"""How long `mk.estimate` takes: the first estimate of a fresh process, and each further plan, memory included.

Three models on the machines that they are trained on: Llama 3 with 8 billion parameters on 8 GPUs, 70 on 64, 405 on
1,024. A plan is paired with the first estimate of its model: the ratio says how much cheaper it is.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from itertools import product
from typing import Any

import mpkit as mk
from mpkit.prediction.cost_model.step import _play_pipeline

CASES = {
    "Llama 3 8B on 8": ("llama3-8b", "8x-h100-nvlink", 64, 8),
    "Llama 3 70B on 64": ("llama3-70b", "8x8-h100-ndr", 512, 64),
    "Llama 3 405B on 1,024": ("llama3-405b", "128x8-h100-ndr", 2048, 1024),
}
"""By title: model, machine, global batch and ranks."""
FRESH = """
import time
begun = time.perf_counter()
import mpkit as mk
plan = mk.Plan(**{plan!r})
found = mk.estimate({model!r}, plan, {machine!r}, global_batch={batch}, sequence=8192)
found.step_time, found.memory[0]
print(time.perf_counter() - begun)
"""
ROUNDS = 5


def measure() -> list[dict[str, Any]]:
    """Measure each case."""
    rows = []
    for title, (model, machine, batch, ranks) in CASES.items():
        plans = _plans(ranks, batch)
        asked = {
            "tp": plans[0].tp,
            "pp": plans[0].pp,
            "dp": plans[0].dp,
            "microbatches": plans[0].microbatches,
        }
        script = FRESH.format(plan=asked | {"schedule": "1f1b"}, model=model, machine=machine, batch=batch)
        cold = statistics.median(_seconds(script) for _ in range(3))
        hardware = mk.hardware(machine)
        times = []
        for _ in range(ROUNDS):
            _play_pipeline.cache_clear()  # which would know the pipelines of the round before
            begun = time.perf_counter()
            for plan in plans:
                found = mk.estimate(model, plan, hardware, global_batch=batch, sequence=8192)
                _ = found.step_time, found.memory[ranks - 1]
            times.append((time.perf_counter() - begun) / len(plans))
        warm = statistics.median(times)
        rows.append(
            {
                "name": f"estimate: {title} ranks, a further plan of {len(plans)}",
                "value": warm * 1e3,
                "unit": "ms",
                "ratio": warm / cold,
                "against": f"of the first in a fresh process, imports included: {cold:.2f} s",
            }
        )
    return rows


def _plans(ranks: int, batch: int) -> list[mk.Plan]:
    """Return the plans that divide a batch among the ranks by tensor, pipeline and data parallelism."""
    return [
        mk.Plan(
            tp=tp, pp=pp, dp=ranks // tp // pp, schedule="1f1b", sequence_parallel=tp > 1, zero=zero, precision="bf16",
            microbatches=batch * tp * pp // ranks,
        )
        for tp, pp, zero in product((1, 2, 4, 8), (1, 2, 4, 8), (0, 1))
        if ranks % (tp * pp) == 0 and batch * tp * pp // ranks >= pp
    ]  # fmt: skip


def _seconds(script: str) -> float:
    return float(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    )
