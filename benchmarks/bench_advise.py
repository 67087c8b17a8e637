"""How long `mk.advise` takes in a fresh process, imports included, beside the same plans estimated one by one.

The first plans of each search are estimated by `mk.estimate`, which checks and builds each: the ratio says what pricing
a whole family at once saves.

The configurations that others published are priced beside the best that the search finds for the same model, machine
and software: the ratio is the median, and the name says how many are within 10 %. Where the authors did not search all
that their software offers, the name also says how many are within 10 % of the best in what they left open.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import mpkit as mk
from benchmarks.pairing import Row, row
from benchmarks.published import key_of
from benchmarks.published_rows import read_folder
from mpkit.prediction.advice.search import PLAYED, LayoutPrices, search, sort_played
from mpkit.prediction.advice.space import TrainingQuestion
from mpkit.prediction.cost_model.calibrate import Observation
from mpkit.prediction.cost_model.preset import preset_for

ROWS = Path(__file__).parent / "rows"
BEST = ("nanotron_best_configs", "megatron_sc21_table1", "megatron_sc21_table2_zero3")
"""Tables of configurations that their authors chose as the best: of a sweep, and by their rules."""
RULED = "megatron_sc21_table1", "megatron_sc21_table2_zero3"
"""Of these, the tables whose tp no sweep chose: it follows the rule of tensor parallelism up to the devices of a node
before pipelines (Narayanan et al. 2021, section 3, takeaways 1 and 2)."""

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


def measure() -> list[Row]:
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
        name = f"advise: {title}, {considered:,.0f} plans, from cold"
        against = f"per plan, of mk.estimate: {each * 1e3:.3f} ms"
        rows.append(row(name, cold, "s", cold / considered / each, against))
    return [*rows, *_published()]


@dataclass(frozen=True)
class Beside:
    """A published configuration beside the best found.

    Attributes:
        step: the published step.
        found: its predicted time over that of the best that its software offers; nan where nothing fits.
        searched: its predicted time over that of the best in what its authors left open.
    """

    step: Observation
    found: float
    searched: float


def published_beside_found(folder: Path) -> list[Beside]:
    """Price each published best configuration beside the best that the search finds."""
    out = []
    for step in read_folder(folder)[0]:
        if step.source not in BEST:
            continue
        preset = preset_for(*key_of(step))
        asked = TrainingQuestion(step.model, step.layout.global_batch, step.sequence)
        priced = LayoutPrices(asked, step.hardware, step.stack, preset)
        roomy, full, _ = search(priced, step.layout.ranks)  # authors fill their memory
        found = sort_played(priced, [roomy, full], lambda seconds, _: (seconds, seconds), PLAYED)
        predicted, ruled = step.predict_seconds(preset.constants), step.source in RULED
        left_open = [each for each in found if not ruled or each.layout.tp == step.layout.tp]
        ratios = [predicted / some[0].seconds if some else float("nan") for some in (found, left_open)]
        out.append(Beside(step, *ratios))
    return out


def _published() -> list[Row]:
    """Compare published configurations with the best that is found, by source."""
    rows = []
    began = time.perf_counter()
    beside = published_beside_found(ROWS)
    took = (time.perf_counter() - began) / len(beside)
    for source in (*BEST, "all published"):
        some = [each for each in beside if source in (each.step.source, "all published")]
        within = sum(each.found <= 1.1 for each in some)
        name = f"advise: {source}, {within} of {len(some)} within 10 % of the best found"
        if source not in BEST or source in RULED:
            name += (
                f", {sum(each.searched <= 1.1 for each in some)} of the best with tp as its authors set it"
            )
        ratios = [each.found for each in some]
        against = f"the best plan found; the largest {max(ratios):.2f}"
        rows.append(row(name, took * len(some), "s", statistics.median(ratios), against))
    return rows
