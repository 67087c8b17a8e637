"""A table of training steps of a format that is not known: its columns are found by what they are commonly called.

    model       layers, hidden and heads, or the name of a known model
    division    tp, pp, dp, cp, zero; micro-batch and global batch; recomputation; sequence parallelism
    machine     gpu and gpus; where the nodes' network is not named, that of the clusters of these devices
    measured    seconds or ms per step, tokens per second, TFLOP/s or MFU per device

TFLOP/s are the model's. They are the hardware's, recomputation included, if a column `flops` says "hardware", and in
tables of Megatron on A100 and V100 (Narayanan et al. 2021, equation 3).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mpkit.devices.catalogue import build_machine
from mpkit.devices.catalogue.clusters import DEVICES, NICS
from mpkit.devices.hardware import Hardware
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.calibrate import Observation
from mpkit.prediction.cost_model.known_models import known_models
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.stack import STACKS, Stack, stack_of

__all__ = ["observation_of"]

Row = Mapping[str, str]

NAMES: Mapping[str, str] = {
    "layers": "layers n_layers num_layers n_layer l",
    "hidden": "hidden d_model hidden_size n_embd dim h",
    "heads": "heads n_heads num_heads num_attention_heads n_head a",
    "kv_heads": "kv_heads n_kv_heads num_key_value_heads",
    "ffn": "ffn intermediate_size ffn_hidden_size d_ff",
    "vocabulary": "vocab vocab_size vocabulary v",
    "sequence": "seq seq_len sequence seq_length sequence_length s context",
    "gpus": "gpus n_gpus num_gpus devices world_size ranks n",
    "nodes": "nodes n_nodes num_nodes",
    "tp": "tp tensor_parallel tensor t model_parallel",
    "pp": "pp pipeline_parallel pipeline p",
    "dp": "dp data_parallel d fsdp",
    "cp": "cp context_parallel",
    "microbatch": "mbs microbatch micro_batch micro_batch_size microbatch_size local_batch b",
    "batch": "gbs global_batch global_batch_size batch batch_size",
    "accumulated": "grad_accum gradient_accumulation accumulation microbatches m",
    "chunks": "vpp vpp_chunks chunks virtual_stages interleave",
    "zero": "zero zero_stage",
    "seconds": "seconds step_s step_time_s iteration_time_s iter_time_s time_s s_per_iteration s_per_step sec_per_iter "
    "iteration_time step_time iter_time time seconds_per_iteration",
    "milliseconds": "ms real_ms step_ms iteration_ms iter_ms time_ms step_time_ms iteration_time_ms",
    "tokens": "tok_per_s tokens_per_s tokens_per_second",
    "tokens_each": "tok_per_s_per_gpu tokens_per_s_per_gpu tok_per_s_gpu tokens_per_second_per_gpu tgs tps",
    "tflops": "tflops_per_gpu model_tflops_per_gpu tflops tflops_gpu",
    "hfu": "hfu_pct hfu hardware_tflops_per_gpu",
    "mfu": "mfu_pct mfu",
    "memory": "mem_gib mem_gb memory_gib memory_gb real_alloc_gib peak_gib",
}  # fmt: skip
"""What a column may be called, apart from case; the first name that a table has counts."""


def observation_of(row: Row) -> Observation:
    """Return what a row measured.

    Raises:
        KeyError: a column is missing; the error names it.
        ValueError: a value is none that is known.
    """
    given = _Given({name.lower(): value for name, value in row.items() if value not in (None, "")})
    model = _model(given)
    gpus = given.whole("gpus") or 8 * given.whole("nodes", 1)
    tp, pp, cp = (given.whole(axis, 1) for axis in ("tp", "pp", "cp"))
    if (
        "pp" not in given and "tp" in given and "model_parallel" in given.row
    ):  # SC'21: inside a node, then stages
        tp, pp = min(8, tp), max(1, tp // 8)
    dp = gpus // (tp * pp * cp)
    mbs = given.whole("microbatch", 1)
    batch = given.whole("batch") or dp * mbs * given.whole("accumulated", 1)
    chunks = given.whole("chunks", 1)
    machine, stack = _machine(given.row, gpus), _stack(given.row)
    layout = Layout(
        pp=pp, dp=dp, cp=cp, tp=tp, zero=given.whole("zero", _sharding(given, stack)), microbatch=mbs,
        microbatches=max(1, batch // (dp * mbs)), virtual_stages=chunks, recompute=_recompute(given.row),
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b", sequence_parallel=_sequence_parallel(given.row, tp),
        head=model.head_in_layers if stack.by_weight else 0.0,
    )  # fmt: skip
    sequence = given.whole("sequence", model.positions or 2048)
    name = f"{given.row.get('model') or given.row.get('name') or f'{model.parameters / 1e9:.3g}B'} on {gpus}"
    memory = given.number("memory") * 2**30
    return Observation(
        name,
        model,
        layout,
        sequence,
        machine,
        stack,
        _seconds(given, model, layout, sequence, machine),
        memory,
    )


class _Given:
    """The values of a row, by what they mean."""

    def __init__(self, row: Row) -> None:
        self.row = row

    def __contains__(self, what: str) -> bool:
        return any(name in self.row for name in NAMES[what].split())

    def number(self, what: str, otherwise: float = 0.0) -> float:
        found = [self.row[name] for name in NAMES[what].split() if name in self.row]
        return float(re.sub(r"[,%\s]|ms$|s$", "", found[0])) if found else otherwise

    def whole(self, what: str, otherwise: int = 0) -> int:
        return int(self.number(what, otherwise))


def _model(given: _Given) -> Architecture:
    if not all(name in given for name in ("layers", "hidden", "heads")):
        name = re.sub(r"[^a-z0-9]", "", given.row.get("model", "").lower().replace("3.1", "3"))
        for known, model in known_models().items():
            if re.sub(r"[^a-z0-9]", "", known) == name:
                return model
        raise KeyError(f"neither layers, hidden and heads nor a known model: {given.row.get('model')!r}")
    gated = "ffn" in given and given.whole("ffn") != 4 * given.whole("hidden")
    return Architecture(
        given.whole("layers"), given.whole("hidden"), given.whole("heads"), kv_heads=given.whole("kv_heads"),
        ffn=given.whole("ffn"), vocabulary=given.whole("vocabulary", 51200), gated=gated, tied=not gated,
        bias=not gated, positions=0 if gated else given.whole("sequence", 2048),
    )  # fmt: skip


def _sharding(given: _Given, stack: Stack) -> int:
    """Return the stage of ZeRO where no column says it: Megatron shards the optimizer where it overlaps."""
    return 3 if given.row.get("fsdp", "0") != "0" else int(stack.name == "megatron" and stack.overlap)


def _recompute(row: Row) -> str:
    """Return what is computed again; Megatron on A100 did so with everything where the table does not say."""
    said = next(
        (row[name] for name in ("recompute", "act_ckpt", "recomputation", "checkpointing") if name in row), ""
    )
    word = said.lower()
    if word.startswith(("select", "present")):
        return "selective"
    if not word and _stack(row).name == "megatron-2021":
        return "full"
    return "full" if word.startswith(("full", "true", "1", "yes")) else "none"


def _sequence_parallel(row: Row, tp: int) -> bool:
    said = row.get("sequence_parallel", row.get("sp", ""))
    if said:
        return said.lower() in {"1", "true", "yes"}
    return tp > 1 and (_recompute(row) == "selective" or "nanotron" in " ".join(row.values()).lower())


def _machine(row: Row, gpus: int) -> Hardware:
    said = " ".join(
        (row.get("gpu", row.get("device", row.get("hardware", row.get("system", "")))), row.get("source", ""))
    ).lower()
    plain = re.sub(r"[^a-z0-9]", "", said)
    found = [
        short for short in sorted(DEVICES, key=len, reverse=True) if re.sub(r"[^a-z0-9]", "", short) in plain
    ]
    short = found[0] if found else "h100" if "nanotron" in said else ""
    if not short:
        raise ValueError(f"gpu={row.get('gpu')!r}: none of {', '.join(DEVICES)}")
    usual = "efa" if "nanotron" in said else "hdr" if short.startswith(("a100", "v100")) else "ndr"
    nic = next((nic for nic in NICS if nic in (row.get("nic") or "").lower()), usual)
    per_node = min(gpus, 64 if short.startswith("gb") else 8)  # a rack of GB200 is one domain of NVLink
    return build_machine(short, nodes=max(1, gpus // per_node), per_node=per_node, nic=nic)


def _stack(row: Row) -> Stack:
    said = " ".join((row.get("stack", ""), row.get("framework", ""), row.get("source", ""))).lower()
    narrow = _narrow(row)
    if any(name in said for name in ("megatron", "mt-nlg", "turing", "korthikanti", "nvidia")):
        if any(name in str(dict(row)).lower() for name in ("a100", "v100")):
            return stack_of("megatron-2021")
        # The README of Megatron-LM names the flag by which its steps overlap tensor-parallel communication.
        switched = row.get("tp_comm_overlap", row.get("async_tp", "1" if "readme" in said else "0"))
        return stack_of(
            "megatron", overlap=row.get("overlap", "1") != "0", userbuffers=switched not in {"0", ""}, **narrow,
        )  # fmt: skip
    for name in sorted(STACKS, key=len, reverse=True):
        if name in said:
            return stack_of(name, **narrow)
    return stack_of("llm-foundry", **narrow) if "mosaic" in said else stack_of(None, **narrow)


def _narrow(row: Row) -> dict[str, object]:
    """Return how products run in 8 or 4 bits."""
    said = " ".join(row.get(name, "") for name in ("precision", "dtype", "float8", "fp8")).lower()
    if "fp4" in said:
        return {"fp4": True, "scaling": "block"}
    eight = "fp8" in said or row.get("float8", row.get("fp8", "")) in {"1", "true"}
    scalings = {"mx": "block", "block": "block128", "row": "row"}
    return {"fp8": eight, "scaling": next((how for word, how in scalings.items() if word in said), "tensor")}


def _seconds(given: _Given, model: Architecture, layout: Layout, sequence: int, machine: Hardware) -> float:
    """Return the seconds of a step, whatever was measured.

    Raises:
        KeyError: nothing was.
    """
    tokens, gpus = layout.global_batch * sequence, layout.ranks
    flops = 3 * layout.global_batch * model.forward_flops(sequence, causal=False)
    peak = machine.device.peak.get("bfloat16", machine.device.rate("bfloat16"))
    if "seconds" in given:
        return given.number("seconds")
    if "milliseconds" in given:
        return given.number("milliseconds") / 1e3
    if "tokens_each" in given:
        return tokens / gpus / given.number("tokens_each")
    if "tokens" in given:
        return tokens / given.number("tokens")
    again = 4 / 3 if layout.recompute == "full" else 1.0
    counted = "hardware" in given.row.get("flops", "") or _stack(given.row).name == "megatron-2021"
    if "mfu" in given:
        share = given.number("mfu")
        return flops / gpus / peak / (share / 100 if share > 1 else share)
    if "tflops" in given:
        return flops * (again if counted else 1.0) / gpus / given.number("tflops") / 1e12
    if "hfu" in given:
        return flops * again / gpus / peak / (given.number("hfu") / 100)
    raise KeyError(
        "nothing that was measured: seconds, ms, tok_per_s, tok_per_s_per_gpu, tflops_per_gpu, mfu_pct"
    )
