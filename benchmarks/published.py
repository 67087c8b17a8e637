"""Predictions beside published training steps: `python -m benchmarks.published FOLDER [--write] [--page]`.

For each preset: what is fitted, the error of the fit, the error where each row is left out of it, and the band; then
the error of the prior, by which a stack is priced that is not known, with each stack left out.
`--write` fits the presets anew to the rows in FOLDER and writes `mpkit/prediction/cost_model/presets.csv`; `--page`
writes the table of docs/accuracy.md.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.published_rows import read_folder
from mpkit.prediction.advice.search import rank, search
from mpkit.prediction.cost_model.memory import MemoryModel
from mpkit.prediction.cost_model.preset import (
    EAGER,
    NAMES,
    UNFITTED,
    Observation,
    Preset,
    preset_for,
    preset_of,
    presets,
    prior_of,
)
from mpkit.prediction.cost_model.stack import PRIOR, Constants
from mpkit.prediction.cost_model.workload import Workload

PRESETS = Path(__file__).parents[1] / "mpkit" / "prediction" / "cost_model" / "presets.csv"

ACCURACY = Path(__file__).parents[1] / "docs" / "accuracy.md"
BEGIN, END = "<!-- python -m benchmarks.published benchmarks/rows --page -->", "<!-- end -->"


Key = tuple[str, str]

LIKE: dict[Key, Key] = {
    ("A100 SXM 80GB", "llm-foundry-pure"): ("A100 SXM 40GB", "llm-foundry-pure"),
    ("A100 SXM 80GB", "deepspeed-2021"): ("A100 SXM 80GB", "megatron-2021"),
    ("A100 SXM 40GB", "megatron-2021"): ("A100 SXM 80GB", "megatron-2021"),
    ("H100 SXM 96GB HBM2e", "torchtitan"): ("H100 SXM 96GB HBM2e", "torchtitan-compile"),
    ("GB300 (per GPU)", "megatron"): ("GB200 (per GPU)", "megatron"),
    ("H200 SXM", "torchtitan-compile"): ("H100 SXM 96GB HBM2e", "torchtitan-compile"),
}
"""Where few rows are at hand: the preset that is the prior of this one."""


BEST = ("nanotron_best_configs", "megatron_sc21_table1", "megatron_sc21_table2_zero3")
"""Tables of configurations that their authors chose as the best: of a sweep, and by their rules."""
RULED = "megatron_sc21_table1", "megatron_sc21_table2_zero3"
"""Of these, the tables whose tp no sweep chose: it follows the rule of tensor parallelism up to the devices of a node
before pipelines (Narayanan et al. 2021, section 3, takeaways 1 and 2)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; return the exit code."""
    asked = list(sys.argv[1:] if argv is None else argv)
    write = "--write" in asked
    folders = [each for each in asked if not each.startswith("-")]
    if len(folders) != 1:
        print(__doc__)
        return 2
    steps, left = read_folder(Path(folders[0]))
    if not steps:
        print(f"{folders[0]} has no table of a known format:", *left, sep="\n  ")
        return 1
    if write:
        _write(fit_all(steps).values())
        preset_for.__globals__["presets"].cache_clear()
    if "--page" in asked:
        _write_page(steps)
    errors = stacks_left_out(steps)
    print(
        f"{accuracy_table(steps)}\n\nEach stack left out, with its variants: {errors.mean():.1%} off in the mean, 90 % "
        f"within {np.quantile(errors, 0.9):.0%}; {np.mean(errors <= UNFITTED):.0%} within the band of {UNFITTED:.0%}"
    )
    for each in left:
        print(f"Not expressed: {each}")
    return 0


def fit_all(steps: Sequence[Observation]) -> dict[Key, Preset]:
    """Return a preset for each device and stack."""
    groups = _grouped(steps, key_of)
    fitted: dict[Key, Preset] = {}
    for key in sorted(groups, key=lambda key: key in LIKE):
        fitted[key] = preset_of(groups[key], _prior(key, fitted))
    return fitted


def key_of(step: Observation) -> Key:
    """Return the device and the stack of a step."""
    return step.hardware.device.name, step.stack.name


def _prior(key: Key, fitted: dict[Key, Preset]) -> Constants:
    near = LIKE.get(key)
    if near not in fitted:
        return PRIOR
    constants = fitted[near].constants
    return replace(constants, traffic=EAGER * constants.traffic) if key[1] == "torchtitan" else constants


def _grouped(steps: Iterable[Observation], by: Callable[[Observation], Key]) -> dict[Key, list[Observation]]:
    groups: dict[Key, list[Observation]] = defaultdict(list)
    for step in steps:
        groups[by(step)].append(step)
    return dict(groups)


def accuracy_table(steps: Sequence[Observation]) -> str:
    """Return the table of docs/accuracy.md: what is fitted, and how far off predictions are."""
    lines = [
        "| stack on device | steps | fitted constants | fit error | held-out error | band |",
        "|---|---|---|---|---|---|",
    ]
    for key, rows in sorted(_grouped(steps, key_of).items(), key=lambda item: -len(item[1])):
        preset = preset_for(*key)
        errors = [abs(row.predict_seconds(preset.constants) / row.seconds - 1) for row in rows]
        lines.append(
            f"| {key[1]} on {key[0]} | {len(rows)} | {', '.join(preset.fitted)} | {np.mean(errors):.1%} "
            f"| {preset.error:.1%} | ±{preset.band:.0%} |"
        )
    return "\n".join(lines)


def _write_page(steps: Sequence[Observation]) -> None:
    text = ACCURACY.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    ACCURACY.write_text(f"{before}{BEGIN}\n{accuracy_table(steps)}\n{END}{after}", encoding="utf-8")


def stacks_left_out(steps: list[Observation]) -> np.ndarray:
    """Return the size of the prior's error on each step where only the other stacks are known, and no variant of it."""
    errors = []
    for step in steps:
        others = [one for one in presets().values() if _family(one.stack) != _family(step.stack.name)]
        errors.append(abs(step.predict_seconds(prior_of(step.stack.name, others)) / step.seconds - 1))
    return np.array(errors)


def _family(stack: str) -> str:
    return stack.partition("-")[0]


def allocated(step: Observation) -> float:
    """Return the predicted bytes that the rank with most has allocated by torch at its peak."""
    stages = MemoryModel(step.model, step.sequence, step.stack, step.hardware.device).stages(step.layout)
    return max(sum(memory.values()) - memory["context"] for memory in stages)


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
        batch = step.layout.global_batch
        asked = Workload(step.model, step.hardware, step.stack, preset, batch, step.sequence)
        roomy, full, _ = search(asked, [step.layout.ranks])  # authors fill their memory
        found = sorted((*rank(asked, roomy), *rank(asked, full)), key=lambda each: each.seconds)
        predicted, ruled = step.predict_seconds(preset.constants), step.source in RULED
        left_open = [each for each in found if not ruled or each.layout.tp == step.layout.tp]
        ratios = [predicted / some[0].seconds if some else float("nan") for some in (found, left_open)]
        out.append(Beside(step, *ratios))
    return out


def _write(presets: Iterable[Preset]) -> None:
    with PRESETS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["device", "stack", *NAMES, "fitted", "rows", "error", "band", "sources"])
        for preset in sorted(presets, key=lambda each: (each.stack, each.device)):
            values = [f"{getattr(preset.constants, name):.4g}" for name in NAMES]
            writer.writerow(
                [preset.device, preset.stack, *values, " ".join(preset.fitted), preset.rows, f"{preset.error:.4f}",
                 f"{preset.band:.4f}", preset.sources]
            )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
