"""How long `mk.advise` takes in a fresh process, imports included, beside the same plans estimated one by one.

The first plans of each search are estimated by `mk.estimate`, which checks and builds each: the ratio says what pricing
a whole family at once saves.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import mpkit as mk

CASES = {
    "Llama 3 8B on 8": ("llama3-8b", "8x-h100-nvlink", 256),
    "Llama 3 70B on 64": ("llama3-70b", "8x8-h100-ndr", 512),
    "Llama 3 405B on 1,024": ("llama3-405b", "128x8-h100-ndr", 2048),
}
FRESH = """
import time
begun = time.perf_counter()
import mpkit as mk
found = mk.advise({model!r}, {machine!r}, global_batch={batch}, sequence=8192)
str(found)
print(time.perf_counter() - begun, found.considered)
"""


def measure() -> list[dict[str, Any]]:
    """Measure each case."""
    rows = []
    for title, (model, machine, batch) in CASES.items():
        script = FRESH.format(model=model, machine=machine, batch=batch)
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout
        cold, considered = (float(word) for word in done.split())
        advice = mk.advise(model, machine, global_batch=batch, sequence=8192)
        hardware = mk.hardware(machine)
        begun = time.perf_counter()
        for plan in advice.plans:
            guess = mk.estimate(model, plan, hardware, global_batch=batch, sequence=8192)
            _ = guess.step_time, guess.peak_memory
        each = (time.perf_counter() - begun) / len(advice.plans)
        rows.append(
            {
                "name": f"advise: {title}, {considered:,.0f} plans, from cold",
                "value": cold,
                "unit": "s",
                "ratio": cold / considered / each,
                "against": f"per plan, of mk.estimate: {each * 1e3:.3f} ms",
            }
        )
    return rows
