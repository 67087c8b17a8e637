"""Published training steps: from the rows of a table to what was measured.

A table is known by its columns, whatever its file is called. Each format is a function from a row to an Observation;
what a paper calls TFLOP/s or MFU is turned into seconds by that paper's own convention.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from mpkit.devices.catalogue import build_machine
from mpkit.devices.hardware import Hardware
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.known_models import known_models
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.preset import Observation
from mpkit.prediction.cost_model.stack import stack_of

Row = dict[str, str]


def read_folder(folder: Path) -> tuple[list[Observation], list[str]]:
    """Return the measured steps of all tables in a folder, and what could not be expressed, each with its reason."""
    steps, left = [], []
    for path in sorted(folder.rglob("*.csv")):
        with path.open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        if not rows:
            continue
        columns = {name.split("(")[0].strip('" ') for name in rows[0]}
        read = next((read for needed, read in FORMATS if needed <= columns), None)
        if read is None:
            left.append(f"{path.name}, line 1: ValueError: its columns are those of no known table")
            continue
        for number, row in enumerate(rows, 2):
            short = {name.split("(")[0].strip('" '): value for name, value in row.items() if name}
            try:
                steps.extend(replace(step, source=path.stem) for step in read(short))
            except (KeyError, ValueError) as error:
                left.append(f"{path.name}, line {number}: {type(error).__name__}: {error}")
    return steps, left


def _ints(row: Row, *names: str) -> list[int]:
    return [int(float(row[name])) for name in names]


def _machine(device: str, gpus: int, nic: str) -> Hardware:
    return build_machine(device, nodes=max(1, gpus // 8), per_node=min(8, gpus), nic=nic)


def _gpt(layers: int, hidden: int, heads: int, vocabulary: int, sequence: int) -> Architecture:
    return Architecture(
        layers, hidden, heads, vocabulary=vocabulary, positions=sequence, tied=True, bias=True
    )


def megatron_flops(model: Architecture, batch: int, sequence: int) -> float:
    """Return the FLOPs of a step with full recomputation as Megatron counts them.

    Source: Narayanan et al. 2021, equation 3.
    """
    h, per_token = model.hidden, 96.0 * batch * sequence * model.layers * model.hidden**2
    return per_token * (1 + sequence / (6 * h) + model.vocabulary / (16 * model.layers * h))


def _megatron(row: Row) -> Iterator[Observation]:
    """SC'21, table 1: interleaved where a rank has several chunks.

    Raises:
        ValueError: the row is of another GPU, so it is not of that table.
    """
    if "a100" not in row.get("gpu", "a100").lower():
        raise ValueError(f"gpu={row['gpu']!r}: this table was measured on A100")
    layers, hidden, heads, tp, pp, mbs, batch, gpus = _ints(
        row, "layers", "hidden", "heads", "tp", "pp", "mbs", "gbs", "gpus"
    )
    sequence, vocabulary = int(row.get("seq") or 2048), int(row.get("vocab") or 51200)
    chunks = int(row.get("vpp_chunks") or 1)
    model = _gpt(layers, hidden, heads, vocabulary, sequence)
    dp = gpus // tp // pp
    layout = Layout(
        pp=pp, dp=dp, tp=tp, microbatch=mbs, microbatches=batch // dp // mbs, virtual_stages=chunks,
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b", recompute=row.get("recompute") or "full",
    )  # fmt: skip
    seconds = megatron_flops(model, batch, sequence) / gpus / (float(row["tflops_per_gpu"]) * 1e12)
    device = "a100-40" if "40" in row.get("gpu", "").replace("A100-80GB", "") else "a100"
    yield Observation(
        row["model"],
        model,
        layout,
        sequence,
        _machine(device, gpus, "hdr"),
        stack_of("megatron-2021"),
        seconds,
    )


def _megatron_zero3(row: Row) -> Iterator[Observation]:
    """SC'21, table 2: ZeRO-3 without model parallelism beside PTD; 175B and 530B of table 1's sizes."""
    sizes = {"174.6": (96, 12288, 96), "529.6": (105, 20480, 128)}
    model = _gpt(*sizes[row["params_B"]], 51200, 2048)
    gpus, batch, mbs, parallel = _ints(row, "gpus", "gbs", "mbs", "model_parallel")
    if row["scheme"] == "PTD":
        pp = parallel // 8
        dp, stack = gpus // parallel, "megatron-2021"
        layout = Layout(pp=pp, dp=dp, tp=8, microbatch=mbs, microbatches=batch // dp // mbs, recompute="full")
    else:
        stack = "deepspeed-2021"
        layout = Layout(dp=gpus, zero=3, microbatch=mbs, microbatches=batch // gpus // mbs, recompute="full")
    seconds = megatron_flops(model, batch, 2048) / gpus / (float(row["tflops_per_gpu"]) * 1e12)
    name = f"{row['scheme']} {row['params_B']}B on {gpus}"
    yield Observation(name, model, layout, 2048, _machine("a100", gpus, "hdr"), stack_of(stack), seconds)


def _llm_foundry(row: Row) -> Iterator[Observation]:
    """llm-foundry's throughput tables: FSDP, `SHARD_GRAD_OP` is ZeRO-2; its network of H100 is not named."""
    layers, hidden, heads, vocabulary, sequence, gpus, mbs, accumulated = _ints(
        row, "n_layers", "d_model", "n_heads", "vocab", "seq_len", "gpus", "microbatch", "grad_accum"
    )
    model = Architecture(layers, hidden, heads, vocabulary=vocabulary, positions=sequence, tied=True)
    layout = Layout(
        dp=gpus, zero=3 if row["sharding"] == "FULL_SHARD" else 2, microbatch=mbs, microbatches=accumulated,
        recompute="full" if row["act_ckpt"] == "True" else "none",
    )  # fmt: skip
    device = {"h100_80gb": "h100", "a100_80gb": "a100", "a100_40gb": "a100-40"}[row["gpu"]]
    eight = row["precision"] == "amp_fp8"
    stack = stack_of("llm-foundry-pure" if row["mp_mode"] == "PURE" else "llm-foundry", fp8=eight)
    seconds = float(row["global_batch_tokens"]) / float(row["tok_per_s_per_gpu"]) / gpus
    name = f"{row['model']} s={sequence} on {gpus} {device}" + (" fp8" if eight else "")
    machine = _machine(device, gpus, "ndr" if device == "h100" else "roce-1600")
    yield Observation(name, model, layout, sequence, machine, stack, seconds)


def _nanotron(row: Row) -> Iterator[Observation]:
    """Nanotron's benchmark: MFU counts attention as if it were not causal; EFA between nodes.

    Embeddings are tied where the MLP is narrower than 10,000, and stages are cut by weight (nanotron at e24d2483,
    scripts/scaling_benchmarks.py: create_config; src/nanotron/models/base.py: build_model).
    """
    layers, hidden, heads, ffn, vocabulary, sequence, gpus = _ints(
        row, "layers", "hidden", "heads", "ffn", "vocab", "seq", "gpus"
    )
    dp, tp, pp, accumulated, mbs, zero = _ints(row, "dp", "tp", "pp", "grad_accum", "mbs", "zero")
    model = Architecture(layers, hidden, heads, ffn=ffn, vocabulary=vocabulary, gated=True, tied=ffn < 10_000)
    layout = Layout(
        pp=pp,
        dp=dp,
        tp=tp,
        zero=zero,
        microbatch=mbs,
        microbatches=accumulated,
        sequence_parallel=tp > 1,
        head=model.head_in_layers,
    )
    flops = 3 * layout.global_batch * model.forward_flops(sequence, causal=False)
    seconds = flops / gpus / (989e12 * float(row["mfu_pct"]) / 100)
    name = f"{row['model']} dp{dp} tp{tp} pp{pp} on {gpus}"
    machine = _machine("h100", gpus, "efa")
    yield Observation(name, model, layout, sequence, machine, stack_of("nanotron"), seconds)


def _simumax(row: Row) -> Iterator[Observation]:
    """SimuMax's measured steps of Megatron on one node of B200: models of a few layers, sequences of 4096."""
    case = row["case"]

    def number(name: str, default: int = 1) -> int:
        found = re.search(rf"(?:^|_){name}(\d+)", case)
        return int(found[1]) if found else default

    sequence, layers = number("seq", 4096), number("l", 0)
    known = known_models()
    name = next(key for key in ("llama3_70b", "llama3_405b", "deepseekv2", "deepseekv3") if key in case)
    model = {
        "llama3_70b": replace(known["llama3-70b"], layers=layers),
        "llama3_405b": replace(known["llama3-405b"], layers=layers, kv_heads=16),
        "deepseekv2": replace(known["deepseek-v2"], layers=layers, dense=1),
        "deepseekv3": replace(known["deepseek-v3"], layers=layers, dense=1),
    }[name]
    tp = number("tp")
    layout = Layout(
        pp=number("pp"), dp=number("dp"), cp=number("cp"), tp=tp, ep=number("ep"), zero=1,
        microbatches=number("mbc"), sequence_parallel=tp > 1,
    )  # fmt: skip
    memory = float(row.get("real_alloc_GiB") or 0) * 2**30
    yield Observation(
        case, model, layout, sequence, build_machine("b200"), stack_of("megatron", overlap=False),
        float(row["real_ms"]) / 1e3, memory,
    )  # fmt: skip


def _bridge(row: Row) -> Iterator[Observation]:
    """Megatron-Bridge's performance summary: Llama 3 in 8 and 4 bits, each with the switches of its recipe.

    Gradients are reduced in 16 bits beside the backward, weights gathered beside the forward, interleaved stages post
    their messages ahead, and tensor parallelism runs beside its products but for NVFP4; the first and the last stage of
    126 layers have a layer less; on H100 stages of 70 B have those of its recipe, and 8 B computes 5 of 32 layers again
    (Megatron-Bridge at 067f987d, src/megatron/bridge/perf_recipes/llama).
    """
    gpus, batch, mbs, sequence, tp, pp, cp = _ints(row, "gpus", "gbs", "mbs", "seq", "tp", "pp", "cp")
    model = known_models()[row["model"].lower().replace("_", "-").replace("3.1", "3")]
    device, precision = row["system"].removeprefix("DGX-").lower(), row["precision"]
    chunks, dp = int(row["vp"]) if row["vp"].isdigit() else 1, gpus // (tp * pp * cp)
    cut = (
        tuple(-(-model.layers // pp) - (stage in (0, pp - 1)) for stage in range(pp))
        if model.layers % pp
        else ()
    )
    if device == "h100" and model.layers == 80:
        cut = (10, 10, 10, 11, 10, 10, 10, 9)
    layout = Layout(
        pp=pp, dp=dp, cp=cp, tp=tp, zero=3 if int(row["fsdp"] or 0) else 1, microbatch=mbs,
        microbatches=batch // dp // mbs, virtual_stages=chunks, cut=cut, sequence_parallel=tp > 1,
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
        recompute="every=6" if device == "h100" and model.layers == 32 else "none",
    )  # fmt: skip
    fp4 = precision == "NVFP4"
    stack = stack_of(
        "megatron", gradient=2, reduced=2, userbuffers=not fp4, fp8=not fp4, fp4=fp4,
        scaling="block" if fp4 or precision.startswith("MX") else "tensor",
    )  # fmt: skip
    per_node = min(gpus, 64 if device.startswith("gb") else 8)  # a rack of GB200 is one domain of NVLink
    machine = build_machine(
        device, nodes=gpus // per_node, per_node=per_node, nic="xdr" if device == "gb300" else "ndr"
    )
    seconds = batch * sequence / gpus / float(row["tok_per_s_per_gpu"].split("(")[0])
    name = f"{model.name} {precision} tp{tp} pp{pp} cp{cp} on {gpus} {device}"
    yield Observation(name, model, layout, sequence, machine, stack, seconds)


def _torchtitan(row: Row) -> Iterator[Observation]:
    """Torchtitan's benchmarks: FSDP2, tensor, context and pipeline parallelism; a pipeline has p micro-batches."""
    gpus, fsdp, tp, pp, cp, local = _ints(row, "gpus", "fsdp", "tp", "pp", "cp", "local_batch")
    sequence = int(row["seq_len"])
    model = known_models()[row["model"].lower().replace("3.1", "3")]
    batch = int(row["global_batch"] or local * fsdp)
    keeps = {"none": "none", "full": "full"}.get(row["act_ckpt"], "products")
    dp = gpus // (tp * pp * cp)
    schedule = {"": "1f1b", "1F1B": "1f1b", "Interleaved 1F1B": "interleaved_1f1b"}[row["pp_schedule"]]
    layout = Layout(
        pp=pp, dp=dp, cp=cp, tp=tp, zero=3 if pp == 1 else 2, microbatch=max(1, local // pp),
        microbatches=pp if pp > 1 else max(1, batch // (local * dp)), recompute=keeps, sequence_parallel=tp > 1,
        schedule=schedule, virtual_stages=2 if schedule == "interleaved_1f1b" else 1,
    )  # fmt: skip
    stack = stack_of(
        "torchtitan-compile" if row["compile"] == "1" else "torchtitan",
        fp8=row["float8"] not in {"0", "none", ""},
        scaling="row" if "rowwise" in row["float8"] else "tensor",
        async_tp=row["async_tp"] not in {"0", ""},
    )
    device = "h200" if row["gpu"] == "H200" else "h100-hbm2e"
    seconds = batch * sequence / gpus / float(row["tok_per_s_per_gpu"])
    name = f"{row['table']} {row['model']} on {gpus}" + (" fp8" if stack.fp8 else "")
    memory = float(row["mem_GiB"] or 0) * 2**30
    yield Observation(name, model, layout, sequence, _machine(device, gpus, "ndr"), stack, seconds, memory)


FORMATS: list[tuple[set[str], Callable[[Row], Iterator[Observation]]]] = [
    ({"layers", "hidden", "heads", "tp", "pp", "mbs", "gbs", "tflops_per_gpu"}, _megatron),
    ({"scheme", "params_B", "model_parallel", "tflops_per_gpu"}, _megatron_zero3),
    ({"n_layers", "d_model", "sharding", "tok_per_s_per_gpu"}, _llm_foundry),
    ({"layers", "dp", "tp", "pp", "grad_accum", "mfu_pct"}, _nanotron),
    ({"case", "real_ms"}, _simumax),
    ({"release", "system", "precision", "vp", "tok_per_s_per_gpu"}, _bridge),
    ({"fsdp", "local_batch", "tok_per_s_per_gpu"}, _torchtitan),
]
"""The columns by which a table is known, and how its rows are read."""
