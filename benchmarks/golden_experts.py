"""Memory of Megatron's published cases with experts: `python -m benchmarks.golden_experts`.

`expert_rows/` has the bytes that Megatron-LM's tests recorded on the last rank (tests/functional_tests/test_cases/moe
at d98e8a6, BSD-3), between steps and at the peak, and each case's options. Nothing is fitted to them. Half of the
cases, by the checksum of their names, were kept apart while the formulas were written.
"""

from __future__ import annotations

import csv
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from zlib import crc32

from benchmarks.experts import EXPERT_ROWS
from mpkit.devices.catalogue import build_machine
from mpkit.devices.hardware import Device
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.memory import MemoryModel
from mpkit.prediction.cost_model.stack import MIB, Stack, stack_of

__all__ = ["ExpertCase", "main", "read_expert_cases"]

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


def main() -> int:
    """Print the report; return the exit code."""
    cases = read_expert_cases()
    for title, apart in (("at hand", False), ("kept apart", True)):
        half = [case for case in cases if not case.lacking and case.apart == apart]
        resident = _summary([case.errors[0] for case in half])
        peak = _summary([case.errors[1] for case in half if not case.resumed])
        print(f"{title}: resident {resident}; peak {peak}")
    for why, count in Counter(case.lacking for case in cases if case.lacking).items():
        print(f"not predicted: {count} recordings, for {why}")
    return 0


def _summary(errors: Sequence[float]) -> str:
    """Say how many there are, their median size and the worst."""
    return (
        f"{len(errors)} recordings, median {median(map(abs, errors)):.1%}, worst {max(errors, key=abs):+.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
