"""Memory of Megatron's published cases: `python -m benchmarks.golden FOLDER`.

FOLDER has `megatron_golden.csv`: Megatron-LM's golden values (tests/functional_tests/test_cases at d98e8a6), with the
options of each case. Of dense models, the peak that the last rank has allocated is predicted beside the recorded one.
The models are small, so that their times are those of launches, and not predicted.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

from mpkit.devices.catalogue import build_machine
from mpkit.devices.hardware import Device
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.memory import MemoryModel
from mpkit.prediction.cost_model.stack import Stack, stack_of

__all__ = ["Case", "main", "read_cases"]

TABLE = "megatron_golden.csv"
MIB = 2**20
GPT2_TOKENS = 50257
LARGE = 0.05
OLDER = "dracooci"
"""Files of software that did not fuse attention where cases leave the choice to it."""


@dataclass(frozen=True)
class Case:
    """A case of Megatron's tests on a device.

    Attributes:
        name, device: the case and where it ran.
        model, layout, sequence, stack: what it asked for.
        peak: bytes that the last rank has allocated at its peak.
    """

    name: str
    device: Device
    model: Architecture
    layout: Layout
    sequence: int
    stack: Stack
    peak: float

    @cached_property
    def predicted(self) -> float:
        """The bytes of the last rank at its peak, without what is outside torch's allocator."""
        stages = MemoryModel(self.model, self.sequence, self.stack, self.device).stages(self.layout)
        return sum(stages[-1].values()) - stages[-1]["context"]

    @property
    def error(self) -> float:
        """The relative error of the predicted peak."""
        return self.predicted / self.peak - 1


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; return the exit code."""
    folders = list(sys.argv[1:] if argv is None else argv)
    if len(folders) != 1 or not (Path(folders[0]) / TABLE).is_file():
        print(__doc__)
        return 2
    cases = read_cases(Path(folders[0]))
    errors = [abs(case.error) for case in cases]
    print(f"{len(cases)} runs: median {median(errors):.1%}, worst {max(errors):.1%}; above {LARGE:.0%}:")
    for case in cases:
        if abs(case.error) > LARGE:
            print(f"{case.error:+6.1%} {case.name} on {case.device.name}")
    return 0


def read_cases(folder: Path) -> list[Case]:
    """Return the runs of dense decoders that recorded memory.

    What the table does not say follows from how Megatron names and writes its cases. Those that resume leave the
    attention to Transformer Engine, which fuses it but for the oldest files; the others, except with context
    parallelism, do not fuse it. All but those with context parallelism, or named nondeterministic or resharded, set
    CUBLAS_WORKSPACE_CONFIG=:4096:8.
    """
    with (folder / TABLE).open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["case"].startswith("gpt/gpt3") and row["mem_max"]]
    return [case for row in rows if (case := _case(row))]


def _case(row: Mapping[str, str]) -> Case | None:
    """Return the case of a row; None if it has what the cost model does not: batches of several sizes, fp8."""
    name = row["case"].removeprefix("gpt/gpt3_").removeprefix("mcore_")
    if not row["global-batch-size"] or row["fp8-format"]:
        return None
    tp, pp, cp = (
        int(row[f"{axis}-parallel-size"] or 1) for axis in ("tensor-model", "pipeline-model", "context")
    )
    world = int(row["nodes"] or 1) * int(row["gpus_per_node"] or 8)
    samples, batch = int(row["micro-batch-size"]), int(row["global-batch-size"])
    dp = min(world // (tp * pp * cp), batch // samples)
    on = {column for column, value in row.items() if value == "true"}
    chunk, sharded = int(row["num-layers-per-virtual-pipeline-stage"] or 0), "use-distributed-optimizer" in on
    model = _model(row, name, tp, pp)
    chunks = model.layers // pp // chunk if chunk and pp > 1 else 1
    layout = Layout(
        pp=pp, dp=dp, cp=cp, tp=tp, zero=int(sharded), microbatch=samples, microbatches=batch // dp // samples,
        virtual_stages=chunks, schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
        recompute=row["recompute-granularity"] or "none", sequence_parallel="sequence-parallel" in on,
        cut=(2, 4, 4, 2) if "uneven" in name else (),
        sharded=dp * cp // 2 if "multi_dist_optimizer_instances" in name else 0,
    )  # fmt: skip
    stack = _stack(row, name)
    return Case(
        name, build_machine(_device(row)).device, model, layout, int(row["seq-length"]), stack,
        float(row["mem_max"]),
    )  # fmt: skip


def _device(row: Mapping[str, str]) -> str:
    """Return the short name of a row's device; files of LTS without one are of A100."""
    return next((short for short in ("h100", "gb200") if short in row["file"]), "a100")


def _model(row: Mapping[str, str], name: str, tp: int, pp: int) -> Architecture:
    """Return the model of a row, whose vocabulary is padded to a multiple of 128 x tp."""
    hidden, rerun = (
        int(row["hidden-size"]),
        "reruns" in name,
    )  # whose options have --kv-channels 128 and --swiglu
    gated = rerun or "swiglu" in name
    vocabulary = -(-GPT2_TOKENS // (128 * tp)) * 128 * tp
    return Architecture(
        int(row["num-layers"]), hidden, int(row["num-attention-heads"]), kv_heads=int(row["num-query-groups"] or 0),
        ffn=int(row["ffn-hidden-size"] or (8 * hidden // 3 // 64 * 64 if gated else 4 * hidden)), gated=gated,
        vocabulary=vocabulary, tied=not (rerun or "untie" in name or "uneven" in name),
        bias=not (rerun or "disable_bias" in name), head_dim=128 if rerun else 0,
        positions=0 if rerun or "rope" in name else int(row["seq-length"]), qk_norm="qk_layernorm" in name,
    )  # fmt: skip


def _stack(row: Mapping[str, str], name: str) -> Stack:
    """Return what the software does for a row."""
    engine, half, device = (
        row["transformer-impl"] == "transformer_engine",
        row["fp16"] == "true",
        _device(row),
    )
    ring, deferred = row["context-parallel-size"] not in {"", "1"}, "defer_embedding" in name
    free = ring or "nondeterministic" in name or "reshard" in name  # of CUBLAS_WORKSPACE_CONFIG
    fused = engine and (free or ("resume" in name and OLDER not in row["file"]))
    flash = fused and not ring and (device == "a100" or (device == "gb200" and not free))  # else cuDNN's
    return stack_of(
        "megatron", fused=fused, attention_outputs=1 + flash, dropout=not (ring or "reruns" in name),
        gradient=2 if half else 4, states=16 if half else 12, placeholders=deferred, deferred=2 * deferred,
        transformer_engine=engine, logits=10 if "loss_fusion" in name else 6,
        cublas_workspace=0 if free else 32 * MIB, overlap=row["overlap-grad-reduce"] == "true",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
