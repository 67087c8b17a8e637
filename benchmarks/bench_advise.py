"""How long `mk.advise` takes in a fresh process, imports included, beside the same plans estimated one by one.

The first plans of each search are estimated by `mk.estimate`, which checks and builds each: the ratio says what pricing
a whole family at once saves.

The configurations that others published as their best are priced beside the best that the search finds for the same
model, machine and software: the ratio is the median, and the name says how many are within 10 %.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mpkit as mk
from benchmarks.published import key_of
from benchmarks.published_rows import read_folder
from mpkit.advice.search import Priced, search
from mpkit.advice.space import Question
from mpkit.cost_model.preset import preset_for

ROWS = Path(__file__).parent / "rows"
BEST = ("nanotron_best_configs", "megatron_sc21_table1", "megatron_sc21_table2_zero3")
"""Tables of configurations that their authors chose as the best: of a sweep, and by their rules."""

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
    return [*rows, *_published()]


def _published() -> list[dict[str, Any]]:
    """Compare published configurations with the best that is found."""
    rows = []
    steps, _ = read_folder(ROWS)
    for source in BEST:
        ratios = []
        took = time.perf_counter()
        for step in (each for each in steps if each.source == source):
            preset = preset_for(*key_of(step))
            asked = Question(step.model, step.layout.global_batch, step.sequence)
            found, _ = search(Priced(asked, step.hardware, step.stack, preset), step.layout.ranks)
            ratios.append(step.predicted(preset.constants) / found[0].seconds if found else float("nan"))
        within = sum(ratio <= 1.1 for ratio in ratios)
        rows.append(
            {
                "name": f"advise: {source}, {within} of {len(ratios)} within 10 % of the best found",
                "value": time.perf_counter() - took,
                "unit": "s",
                "ratio": statistics.median(ratios),
                "against": "the best plan found; the largest " + f"{max(ratios):.2f}",
            }
        )
    return rows
