"""What one GPU can check of mpkit, and how far its predictions are off there.

    python -m benchmarks.gpu.one_gpu measure FOLDER [PART ...]    on a machine with a GPU; FOLDER gets measured.json
    python -m benchmarks.gpu.one_gpu predict measured.json        anywhere: the table of predictions beside it

strategies  up to four ranks share the GPU (gloo carries their messages); every step is proved equal to plain PyTorch
steps       a plain PyTorch loop of several sizes, and mpkit's serial training of the same: time and memory
experts     the plans that divide experts, proved the same way

`python -m benchmarks costs watch proof` measures what watching and the proof cost on the GPU.
A part that fails says so, and the next one is measured all the same: time on a GPU is short.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import mpkit as mk
from mpkit.models import GPT, next_token_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on the CPU the script itself can be tried
SMALL = {"layers": 4, "width": 64, "heads": 4, "length": 32}
PLANS = {
    "serial": mk.Plan.serial(),
    "serial bf16": mk.Plan.serial(precision="bf16"),
    "naive": mk.Plan.naive_mp(4),
    "GPipe, recomputed": mk.Plan.gpipe(4, microbatches=8, recompute="full"),
    "1F1B": mk.Plan.pipeline("1f1b", 4, 8),
    "interleaved 1F1B": mk.Plan.pipeline("interleaved_1f1b", 2, 4, virtual_stages=2),
    "ZB-H1": mk.Plan.pipeline("zb_h1", 4, 8),
    "DualPipeV": mk.Plan.pipeline("dualpipev", 2, 8),
    "DP": mk.Plan.dp(4),
    "DDP": mk.Plan.ddp(4, bucket_mb=0.1, microbatches=2),
    "ZeRO-1": mk.Plan.zero(1, 4),
    "ZeRO-2, offloaded optimizer": mk.Plan.zero(2, 4, offload="optimizer"),
    "ZeRO-3": mk.Plan.zero(3, 4),
    "ZeRO-3, hybrid shards": mk.Plan.zero(3, 4, dp_shard=2),
    "ZeRO-3, offloaded parameters": mk.Plan.zero(3, 4, offload="params"),
    "ZeRO-1 bf16": mk.Plan.zero(1, 4, precision="bf16"),
    "TP, sequence parallel": mk.Plan.tp(4, sequence_parallel=True),
    "CP zigzag": mk.Plan(cp=2, cp_order="zigzag"),
    "3D with ZeRO-1": mk.Plan(pp=2, dp=2, tp=2, zero=1, schedule="1f1b", microbatches=4),
}
EXPERT_PLANS = {
    "ep": mk.Plan(dp=2, ep=2),
    "ep 4": mk.Plan(dp=4, ep=4),
    "ep, replicas of experts": mk.Plan(dp=4, ep=2, zero=1),
    "ep, ZeRO-3": mk.Plan(dp=4, ep=2, zero=3),
    "ep, tp": mk.Plan(dp=2, ep=2, tp=2),
    "ep, cp": mk.Plan(dp=2, ep=4, cp=2),
    "ep, 1F1B": mk.Plan(pp=2, dp=2, ep=2, schedule="1f1b", microbatches=4),
    "ep bf16": mk.Plan(dp=2, ep=2, precision="bf16"),
    "ep fp16": mk.Plan(dp=2, ep=2, precision="fp16"),
}
GPTS = {"124M": (12, 768, 12), "350M": (24, 1024, 16), "760M": (24, 1536, 16), "1.3B": (24, 2048, 16)}
"""Layers, width and heads of GPT-3's first sizes."""
STEPS = [  # size, samples per step, precision
    ("124M", 8, "full"), ("124M", 8, "bf16"), ("124M", 32, "bf16"), ("350M", 8, "bf16"), ("350M", 8, "full"),
    ("350M", 32, "bf16"), ("760M", 4, "bf16"), ("1.3B", 4, "bf16"), ("1.3B", 16, "bf16"),
]  # fmt: skip
SEQUENCE, VOCAB = (1024, 50304) if DEVICE == "cuda" else (32, 256)


def gpt(size: str) -> GPT:
    """Return a GPT of one of the sizes."""
    layers, width, heads = GPTS[size]
    return GPT(layers=layers, width=width, heads=heads, length=SEQUENCE, vocab=VOCAB)


def adamw(params: Any) -> torch.optim.Optimizer:
    """AdamW, with an eps above what rounding makes of gradients that are zero."""
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-6)


def tokens(batch: int, length: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a batch."""
    both = torch.randint(0, vocab, (batch, length + 1), generator=torch.Generator().manual_seed(1))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def trained(model: GPT, batch: int, precision: str) -> list[float]:
    """Train in plain PyTorch, under autocast in 16 bits; return the seconds of ten steps after three that warm up."""
    optimizer = adamw(model.parameters())
    x, y = (part.to(DEVICE) for part in tokens(batch, SEQUENCE, VOCAB))
    times = []
    for _ in range(13):
        begun = time.perf_counter()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "bf16"):
            loss = next_token_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return times[3:]


# ---- parts


def proved(plans: dict[str, mk.Plan], **sizes: int) -> dict[str, str]:
    """Train a small GPT with each plan; the proof compares every step. A plan that fails says so."""
    data, found = [tokens(16, SMALL["length"], 256)], {}
    for name, plan in plans.items():
        torch.manual_seed(0)
        try:
            with mk.Cluster(plan.ranks, device=DEVICE) as cluster:
                run = cluster.train(
                    GPT(**SMALL, **sizes), data, plan, loss=next_token_loss, optimizer=adamw, steps=3, verify="all",
                    show=False, timeout=60,
                ).wait()  # fmt: skip
                found[name] = str(run.proof)
        except Exception as error:  # printed and kept; the next plan is tried all the same
            found[name] = f"FAILED {type(error).__name__}: {error}"
        print(f"  {name:30} {found[name]}", flush=True)
    return found


def strategies() -> dict[str, str]:
    """Train with each plan."""
    return proved(PLANS)


def steps() -> list[dict[str, Any]]:
    """Measure serial training of each size."""
    rows = []
    for size, batch, precision in STEPS:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = gpt(size)
        row: dict[str, Any] = {"size": size, "batch": batch, "precision": precision}
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row["plain"] = statistics.median(trained(model, batch, precision))
        if DEVICE == "cuda":
            row["plain_allocated"] = torch.cuda.max_memory_allocated()
            row["plain_reserved"] = torch.cuda.max_memory_reserved()
            del model
            gc.collect()
            torch.cuda.empty_cache()
        if batch == 8:
            with mk.Cluster(1, device=DEVICE) as cluster:
                run = cluster.train(
                    gpt(size), [tokens(batch, SEQUENCE, VOCAB)], mk.Plan.serial(precision=precision),
                    loss=next_token_loss, optimizer=adamw, steps=8, verify=False, show=False,
                ).wait()  # fmt: skip
            timeline = run.timeline(clock="measured")
            row["run"] = statistics.median(timeline.step(step).step_time for step in range(3, 8))
            row["run_peak"] = timeline.peak_memory[0]
        rows.append(row)
        print(f"  {json.dumps(row)}", flush=True)
    return rows


def experts() -> dict[str, str]:
    """Train a GPT with experts with each plan that divides them."""
    return proved(EXPERT_PLANS, experts=4, top_k=2)


def measure(folder: Path, names: list[str]) -> None:
    """Measure the parts that are asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable[[], Any]] = {part.__name__: part for part in (strategies, steps, experts)}
    name = torch.cuda.get_device_name(0) if DEVICE == "cuda" else "cpu"
    found: dict[str, Any] = {"gpu": name, "torch": torch.__version__}
    print(f"{name}, torch {torch.__version__}")
    for part in names or parts:
        begun = time.perf_counter()
        print(part, flush=True)
        try:
            found[part] = parts[part]()
        except Exception:
            traceback.print_exc()
        print(f"  ({time.perf_counter() - begun:.0f} s)", flush=True)
        (folder / "measured.json").write_text(json.dumps(found, indent=1))


# ---- beside predictions


def predict(path: Path) -> None:
    """Print the measured steps beside what `mk.estimate` and the played trace predict."""
    found = json.loads(path.read_text())
    machine = "8x-h200-nvlink" if "H200" in found["gpu"] else "8x-h100-nvlink"
    table = Table(title=f"{found['gpu']}, torch {found['torch']}: measured, and predicted / measured")
    titles = (
        "GPT, batch, precision, plain loop, mpkit, estimate, band, played, allocated, estimate, played / run"
    )
    for column in titles.split(", "):
        table.add_column(column, justify="right")
    for row in found["steps"]:
        batch, precision = row["batch"], row["precision"]
        layers, width, heads = GPTS[row["size"]]
        sizes = {"layers": layers, "width": width, "heads": heads, "length": 1024, "vocab": 50304}
        plan = mk.Plan.serial(precision=precision)
        stack = "pytorch-fp32" if precision == "full" else "pytorch"
        said = mk.estimate(GPT(**sizes), plan, machine, global_batch=batch, sequence=1024, stack=stack)
        shape = torch.empty(batch, 1024, dtype=torch.long, device="meta")
        fake = mk.Timeline.of(
            mk.trace_fake(
                lambda sizes=sizes: GPT(**sizes), plan, batch=(shape, shape), loss=next_token_loss, optimizer=adamw,
                steps=2, hardware=machine,
            )
        )  # fmt: skip
        run, peak = row.get("run"), row.get("run_peak", {}).get("total")
        low, high = said.band
        table.add_row(
            row["size"], str(batch), precision, f"{row['plain'] * 1e3:.1f} ms", f"{run * 1e3:.1f} ms" if run else "",
            f"{said.step_time / row['plain']:.2f}", "inside" if low <= row["plain"] <= high else "outside",
            f"{fake.step(1).step_time / (run or row['plain']):.2f}", f"{row['plain_allocated'] / 2**30:.2f} GiB",
            f"{(said.peak_memory - said.memory[0]['context']) / row['plain_allocated']:.2f}",
            f"{fake.peak_memory[0]['total'] / peak:.3f}" if peak else "",
        )  # fmt: skip
    Console(width=160).print(table)


def main() -> None:
    """Measure, or predict."""
    if sys.argv[1] == "measure":
        measure(Path(sys.argv[2]), sys.argv[3:])
    else:
        predict(Path(sys.argv[2]))


if __name__ == "__main__":
    main()
