"""Published steps and memory of mixtures of experts, read from `expert_rows/` (tests/cost_model/test_golden.py).

`moe_folding_T3.csv` is Liu et al. 2025 (arXiv 2504.14960), table 3: utilization of the peak by Megatron-Core on H100.
It does not tell micro-batches and recomputation: it is read with one sample per micro-batch, and as many stages per
rank and as little recomputation as is fastest and fits. `moe_layer_h100.csv` is Megatron-LM's `moe_perf` at d98e8a6:
forward and backward of one layer on 8 H100. `megatron_experts.csv` has the bytes that Megatron-LM's tests recorded on
the last rank (tests/functional_tests/test_cases/moe at d98e8a6, BSD-3), between steps and at the peak. Half of these
cases, by the checksum of their names, were kept apart while the formulas were written. Nothing is fitted to any row.
"""

from __future__ import annotations

import csv
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from zlib import crc32

import mpkit as mk
from mpkit.devices.catalogue import build_machine
from mpkit.devices.hardware import Device, Hardware
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layer import LayerModel, peak_of
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.memory import MemoryModel, most_at_peak
from mpkit.prediction.cost_model.preset import preset_for
from mpkit.prediction.cost_model.stack import MIB, Stack, stack_of
from mpkit.prediction.cost_model.step import StepModel

EXPERT_ROWS = Path(__file__).with_name("expert_rows")
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
            if most_at_peak(memory.ranks(layout), layout.recompute) <= self.machine.device.memory:
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


# ---- memory of Megatron's cases

GPT2_TOKENS = 50257
NOT_MODELLED = {
    "cuda-graph-impl": "the memory pools of CUDA graphs",
    "fine-grained-activation-offloading": "activations that wait on the host",
    "fp8-format": "operands that are kept in 8 bits",
    "mtp-num-layers": "layers that predict further tokens (MTP)",
    "optimizer": "the states of Muon, sharded by layer",
    "use-megatron-fsdp": "the buffers of Megatron-FSDP",
}
"""Options of cases whose memory is not predicted, and what the cost model lacks for them."""


@dataclass(frozen=True)
class ExpertCase:
    """A recording of a case.

    Attributes:
        name, recording: the case; the software (dev or lts) and the machine.
        options: by name, without dashes; variables of the environment too.
        ranks: on how many GPUs it ran.
        resident, peak: bytes that the last rank has allocated between steps and at its peak.
    """

    name: str
    recording: str
    options: Mapping[str, str]
    ranks: int
    resident: float
    peak: float

    @property
    def apart(self) -> bool:
        """Whether the case was kept apart; with its variants on fewer nodes and in another order of ranks."""
        return crc32(self.name.removesuffix("_1node").removesuffix("_dp_last").encode()) % 2 == 1

    @property
    def lacking(self) -> str:
        """What the cost model does not have that the case needs; "" if nothing."""
        return next((why for option, why in NOT_MODELLED.items() if option in self.options), "")

    @property
    def resumed(self) -> bool:
        """Whether it continued from a checkpoint, so that its peak can be that of loading."""
        return self.recording.endswith("_2nd")

    @cached_property
    def device(self) -> Device:
        """The device; recordings of LTS without one are of A100."""
        short = next((short for short in ("h100", "gb200") if short in self.recording), "a100")
        return build_machine(short).device

    @cached_property
    def model(self) -> Architecture:
        """The model, whose vocabulary is padded."""
        on, tp, hidden = self.options, self._size("tensor-model-parallel-size", 1), self._size("hidden-size")
        multiple, gated = self._size("make-vocab-size-divisible-by", 128) * tp, "swiglu" in on
        return Architecture(
            self._size("num-layers"), hidden, self._size("num-attention-heads"), gated=gated,
            ffn=self._size("ffn-hidden-size") or (8 * hidden // 3 // 64 * 64 if gated else 4 * hidden),
            vocabulary=-(-GPT2_TOKENS // multiple) * multiple, tied="untie-embeddings-and-output-weights" not in on,
            positions=0 if "position-embedding-type" in on else self._size("max-position-embeddings"),
            experts=self._size("num-experts"), top_k=self._size("moe-router-topk"),
            expert_ffn=self._size("moe-ffn-hidden-size"),
            shared_ffn=self._size("moe-shared-expert-intermediate-size"),
        )  # fmt: skip

    @cached_property
    def layout(self) -> Layout:
        """How it divides a step."""
        tp, pp, cp, ep = (
            self._size(f"{axis}-parallel-size", 1)
            for axis in ("tensor-model", "pipeline-model", "context", "expert-model")
        )
        dp, samples = self.ranks // (tp * pp * cp), self._size("micro-batch-size")
        instances = self._size("num-distributed-optimizer-instances", 1)
        return Layout(
            pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, etp=self._size("expert-tensor-parallel-size", tp),
            zero=int("use-distributed-optimizer" in self.options), microbatch=samples,
            microbatches=self._size("global-batch-size") // dp // samples,
            recompute=self.options.get("recompute-granularity", "none"),
            sequence_parallel="sequence-parallel" in self.options,
            sharded=dp * cp // instances if instances > 1 else 0,
        )  # fmt: skip

    @cached_property
    def stack(self) -> Stack:
        """What the software does.

        Software of LTS does not fuse attention where a case leaves that to it. The router multiplies with Transformer
        Engine whatever the other layers do (megatron/core/transformer/moe/moe_utils.py), so its workspace is there.
        """
        on, half = self.options, "fp16" in self.options
        backend = on.get("attention-backend", "unfused" if self.recording.startswith("lts") else "fused")
        fused = backend != "unfused" and not self._local
        return stack_of(
            "megatron", fused=fused, attention_outputs=1 + (fused and backend == "flash"),
            dropout=on.get("hidden-dropout") != "0.0", gradient=2 if half else 4, states=16 if half else 12,
            placeholders=False, grouped="moe-grouped-gemm" in on, overlap="overlap-grad-reduce" in on,
            cublas_workspace=32 * MIB if "CUBLAS_WORKSPACE_CONFIG" in on else 0,
        )  # fmt: skip

    @property
    def shared_buffer(self) -> float:
        """The bytes of the one buffer that stays and that all uses share: the largest of them counts.

        An all-gather of the tokens of all ranks among which experts are divided, where no all-to-all sends them, and
        the scores of Megatron's own attention (megatron/core: token_dispatcher.py, dot_product_attention.py).
        """
        layout, sequence = self.layout, self._size("seq-length")
        tokens = layout.microbatch * sequence / layout.cp
        gathered = scores = 0.0
        if self.options.get("moe-token-dispatcher-type", "allgather") == "allgather":
            gathered = tokens / layout.tp * layout.expert_tp * layout.ep * self.model.hidden
        if self._local:
            scores = tokens * sequence * self.model.heads / layout.tp
        return 2 * max(gathered, scores)

    @property
    def predicted_peak(self) -> float:
        """The predicted bytes of the last rank at its peak, without what is outside torch's allocator."""
        return sum(self._held.values()) - self._held["context"] + self.shared_buffer

    @property
    def predicted_resident(self) -> float:
        """The predicted bytes of the last rank between steps."""
        return (
            sum(self._held[kind] for kind in ("params", "grads", "optimizer", "buffers")) + self.shared_buffer
        )

    @property
    def errors(self) -> tuple[float, float]:
        """The relative errors of both."""
        return self.predicted_resident / self.resident - 1, self.predicted_peak / self.peak - 1

    @cached_property
    def _held(self) -> dict[str, float]:
        memory = MemoryModel(self.model, self._size("seq-length"), self.stack, self.device)
        return memory.stages(self.layout)[-1]

    @property
    def _local(self) -> bool:
        return self.options["transformer-impl"] == "local"

    def _size(self, option: str, otherwise: int = 0) -> int:
        return int(self.options.get(option, otherwise))


def read_expert_cases(folder: Path = EXPERT_ROWS) -> list[ExpertCase]:
    """Return all recordings of a folder's two tables."""
    with (folder / "megatron_experts_options.csv").open(encoding="utf-8") as file:
        options = {row["case"]: _read_options(row["options"]) for row in csv.DictReader(file)}
    with (folder / "megatron_experts.csv").open(encoding="utf-8") as file:
        return [
            ExpertCase(
                row["case"], row["recording"], options[row["case"]], int(row["nodes"]) * int(row["gpus_per_node"]),
                float(row["resident_bytes"]), float(row["peak_bytes"]),
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


def _read_options(line: str) -> dict[str, str]:
    """Return the options of a command line: a value each, "" for a switch."""
    found: dict[str, str] = {}
    name = ""
    for word in shlex.split(line):
        if word.startswith("--"):
            name = word.removeprefix("--")
            found[name] = ""
        elif name:
            found[name] = word
        else:
            variable, _, found[variable] = word.partition("=")
    return found
