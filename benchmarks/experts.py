"""Published steps of mixtures of experts beside their estimates (tests/cost_model/test_golden.py).

`expert_rows/` has `moe_folding_T3.csv` (Liu et al. 2025, arXiv 2504.14960, table 3: utilization of the
peak by Megatron-Core on H100) and `moe_layer_h100.csv` (Megatron-LM's `moe_perf` at d98e8a6: forward and backward of
one layer on 8 H100). Nothing is fitted to either. The first does not tell micro-batches and recomputation: it is read
with one sample per micro-batch, and as many stages per rank and as little recomputation as is fastest and fits.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import mpkit as mk
from mpkit.devices.hardware import Hardware
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layer import LayerModel, peak_of
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.memory import MemoryModel
from mpkit.prediction.cost_model.preset import preset_for
from mpkit.prediction.cost_model.stack import stack_of
from mpkit.prediction.cost_model.step import StepModel

__all__ = ["EXPERT_ROWS", "MODELS", "FoldingRow", "read_rows", "seconds_of_layer"]

EXPERT_ROWS = Path(__file__).with_name("expert_rows")
FOLDING = "moe_folding_T3.csv"
MIXTRAL = Architecture(56, 6144, 48, kv_heads=8, ffn=16384, vocabulary=32768, gated=True, experts=8, top_k=2)
MODELS = {
    "Mixtral-8x22B": MIXTRAL,
    "Mixtral-8x22B-G8T8": replace(MIXTRAL, experts=64, top_k=8, expert_ffn=2048),
    "Llama3-8x70B": Architecture(
        80, 8192, 64, kv_heads=8, ffn=28672, vocabulary=128256, gated=True, experts=8, top_k=2
    ),
    "Qwen2-57B-A14B": Architecture(
        28, 3584, 28, kv_heads=4, vocabulary=151936, gated=True, experts=64, top_k=8, expert_ffn=2560, shared_ffn=20480
    ),
}  # fmt: skip


@dataclass(frozen=True)
class FoldingRow:
    """A row of the folding table.

    Attributes:
        model, method: as the table has them.
        layouts: what the row can be, whose micro-batches and recomputation are not told.
        sequence: tokens per sample.
        machine: where it ran.
        utilization: the measured share of the peak; 0 where it was out of memory.
    """

    model: str
    method: str
    layouts: Sequence[Layout]
    sequence: int
    machine: Hardware
    utilization: float

    @property
    def predicted(self) -> float:
        """The predicted utilization of the fastest layout that fits; 0 if none does."""
        model, stack = MODELS[self.model], stack_of("megatron")
        constants, took = preset_for(self.machine.device.name, stack.name).constants, float("inf")
        memory = MemoryModel(model, self.sequence, stack, self.machine.device)
        time = StepModel(model, self.sequence, self.machine, stack, constants)
        for layout in self.layouts:
            if memory.of(layout).peak(layout.recompute) <= self.machine.device.memory:
                took = min(took, time.step(layout).seconds)
        flops = 3 * self.layouts[0].global_batch * model.forward_flops(self.sequence, causal=False)
        return flops / took / self.layouts[0].ranks / peak_of(self.machine.device, "bfloat16")


def read_rows(path: Path) -> list[FoldingRow]:
    """Return the rows of a folding table."""
    with path.open(encoding="utf-8") as file:
        return [_row(row) for row in csv.DictReader(file)]


def _row(row: Mapping[str, str]) -> FoldingRow:
    gpus, batch, method = int(row["gpus"]), int(row["gbs"]), row["method"]
    cp, tp, ep, pp = (int(row[axis] or 1) for axis in ("cp", "tp", "ep", "pp"))
    folded = "Folding" in method or "FSDP" in method
    layout = Layout(
        pp=pp, dp=gpus // pp // tp // cp, cp=cp, tp=tp, ep=ep, etp=1 if folded and ep > 1 else tp,
        zero=3 if "FSDP" in method else 1, sequence_parallel=tp > 1,
    )  # fmt: skip
    machine = mk.hardware("h100", nodes=gpus // 8, nic="ndr")
    failed = row["mfu_percent"] == "OOM"
    return FoldingRow(
        row["model"], method, list(_sizes(layout, MODELS[row["model"]].layers, batch)), int(row["seq"]), machine,
        0.0 if failed else float(row["mfu_percent"]) / 100,
    )  # fmt: skip


def _sizes(layout: Layout, layers: int, batch: int) -> Iterator[Layout]:
    """Yield what the table does not tell: samples of a micro-batch, stages per rank, recomputation."""
    samples, stages = max(1, batch // layout.dp), [1]
    if layout.pp > 1:
        stages += [v for v in range(2, layers // layout.pp + 1) if layers % (v * layout.pp) == 0]
    for size, v, recompute in product((1,), stages, ("none", "full")):
        m = samples // size
        if samples % size == 0 and (v == 1 or m % layout.pp == 0):
            yield replace(
                layout, microbatch=size, microbatches=m, recompute=recompute, virtual_stages=v,
                schedule="interleaved_1f1b" if v > 1 else "1f1b",
            )  # fmt: skip


def seconds_of_layer(row: Mapping[str, str]) -> tuple[float, float]:
    """Return the predicted forward and backward of the MLP of a layer, in seconds.

    What `moe_perf` builds is in its code (Megatron-LM at 32f2c9c, tests/functional_tests/test_cases/common): the shared
    experts of its table of sizes are not handed on to the layer, and its MLPs are Megatron's default, without a gate.
    """
    hidden, case = int(row["hidden"]), row["case"]
    model = Architecture(
        1,
        hidden,
        hidden // 128,
        ffn=int(row["expert_ffn"]),
        experts=int(row["experts"]),
        top_k=int(row["topk"]),
    )
    machine = mk.hardware("8x-h100-nvlink")
    stack = stack_of(
        "megatron", fp8="fp8" in case, scaling="block128", deduplicates="a2a" not in case, gradient=2
    )
    constants, sequence = preset_for(machine.device.name, stack.name).constants, int(row["seq"])
    both = LayerModel(model, sequence, machine, stack, constants).kind(0, Layout(dp=8, ep=8, etp=1))
    # An attention, whose norms and residuals the layer's benchmark leaves out.
    alone = Architecture(1, hidden, hidden // 128, ffn=1)
    without = LayerModel(alone, sequence, machine, stack, constants).kind(0, Layout(dp=8))
    forward, backward = (
        sum(getattr(both, side).values()) - sum(getattr(without, side).values())
        for side in ("forward", "backward")
    )
    return forward, backward
