"""What one GPU can check of mpkit, and how far its predictions are off there.

    python -m benchmarks.gpu.one_gpu measure FOLDER [PART ...]    on a machine with a GPU; FOLDER gets measured.json
    python -m benchmarks.gpu.one_gpu predict measured.json        anywhere: the table of predictions beside it

strategies  up to four ranks share the GPU (gloo carries their messages); every step is proved equal to plain PyTorch
steps       a plain PyTorch loop of several sizes, and mpkit's serial training of the same: time and memory
watch       the same loop watched and unwatched, in turn: the ratio
proof       fifty steps with the default proof and without, in turn: the ratio, and what the proof says
experts     the plans that divide experts, proved; a step of a GPT with eight experts per layer, and their load

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
STEPS_OF_PROOF = 50 if DEVICE == "cuda" else 4
FOUND: dict[str, Any] = {}


def gpu() -> str:
    """Return the name of the GPU."""
    return torch.cuda.get_device_name(0) if DEVICE == "cuda" else "cpu"


def gpt(size: str) -> GPT:
    """Return a GPT of one of the sizes."""
    layers, width, heads = GPTS[size]
    return GPT(layers=layers, width=width, heads=heads, length=SEQUENCE, vocab=VOCAB)


def adamw(params: Any) -> torch.optim.Optimizer:
    """AdamW, with an eps above what rounding makes of gradients that are zero."""
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-6)


def tokens(batch: int, length: int = SEQUENCE, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a batch."""
    both = torch.randint(0, vocab, (batch, length + 1), generator=torch.Generator().manual_seed(1))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def wait() -> None:
    """Wait for the GPU."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def trained(
    model: GPT, batch: int, precision: str, steps: int, after: Callable[[], None] = wait
) -> list[float]:
    """Train in plain PyTorch, under autocast in 16 bits; return the seconds of each step, the first three left out."""
    model = model.to(DEVICE)
    optimizer = adamw(model.parameters())
    x, y = (part.to(DEVICE) for part in tokens(batch, model.config.length, model.config.vocab))
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "bf16"):
            loss = next_token_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
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
        row["plain"] = statistics.median(trained(model, batch, precision, 13))
        if DEVICE == "cuda":
            row["plain_allocated"] = torch.cuda.max_memory_allocated()
            row["plain_reserved"] = torch.cuda.max_memory_reserved()
            del model
            gc.collect()
            torch.cuda.empty_cache()
        if batch == 8:
            with mk.Cluster(1, device=DEVICE) as cluster:
                run = cluster.train(
                    gpt(size), [tokens(batch)], mk.Plan.serial(precision=precision), loss=next_token_loss,
                    optimizer=adamw, steps=8, verify=False, show=False,
                ).wait()  # fmt: skip
            timeline = run.timeline(clock="measured")
            row["run"] = statistics.median(timeline.step(step).step_time for step in range(3, 8))
            row["run_peak"] = timeline.peak_memory[0]
        rows.append(row)
        print(f"  {json.dumps(row)}", flush=True)
    return rows


def experts() -> dict[str, Any]:
    """Train a GPT with experts by each plan that divides them; then measure one of 124M parameters with eight each."""
    found: dict[str, Any] = dict(proved(EXPERT_PLANS, experts=4, top_k=2))
    layers, width, heads = GPTS["124M"]
    with torch.device(DEVICE):
        model = GPT(layers=layers, width=width, heads=heads, length=SEQUENCE, vocab=VOCAB, experts=8, top_k=2)
    found["step"] = statistics.median(trained(model, 8, "bf16", 13))
    print(f"  124M with eight experts per layer: {found['step'] * 1e3:.1f} ms a step", flush=True)
    return found


def _loop(ctx: Any, model: GPT, batch: int) -> float:
    torch.manual_seed(0)
    return statistics.median(trained(model, batch, "bf16", 25))


def watch() -> dict[str, Any]:
    """Compare a watched loop with the same unwatched: the medians of three pairs' ratios, and of the plain step."""
    found = {}
    for what, model, batch in (("124M", gpt("124M"), 8), ("small", GPT(**SMALL), 8)):
        with mk.Cluster(1, device=DEVICE) as cluster:
            pairs = [
                [cluster.run(_loop, model, batch, watch=on)[0] for on in (True, False)] for _ in range(3)
            ]
        found[what] = [statistics.median(a / b for a, b in pairs), statistics.median(b for _, b in pairs)]
        print(f"  {what}: watched / unwatched {found[what][0]:.3f} of {found[what][1] * 1e3:.2f} ms")
    return found


def proof() -> dict[str, Any]:
    """Compare trainings that prove their first steps with the same unproved: the medians of the pairs' ratios."""
    found: dict[str, Any] = {}
    for size, batch, precision, rounds in (
        ("124M", 8, "bf16", 2),
        ("124M", 8, "full", 1),
        ("350M", 8, "bf16", 1),
    ):
        torch.manual_seed(0)
        model, data, times = gpt(size), [tokens(batch)], []
        with mk.Cluster(1, device=DEVICE) as cluster:
            for number in range(2 * rounds + 1):  # the first warms up
                verify: Any = False if number % 2 else "first"
                begun = time.perf_counter()
                run = cluster.train(
                    model, data, mk.Plan.serial(precision=precision), loss=next_token_loss, optimizer=adamw,
                    steps=STEPS_OF_PROOF, verify=verify, show=False,
                ).wait()  # fmt: skip
                times.append(time.perf_counter() - begun)
                if verify:
                    said = str(run.proof)
        ratios = [times[2 * pair + 2] / times[2 * pair + 1] for pair in range(rounds)]
        found[f"{size} {precision}"] = [statistics.median(ratios), times, said]
        print(f"  {size} {precision}: {json.dumps(found[f'{size} {precision}'])}", flush=True)
    return found


def measure(folder: Path, names: list[str]) -> None:
    """Measure the parts that are asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable[[], Any]] = {
        part.__name__: part for part in (strategies, steps, watch, proof, experts)
    }
    FOUND.update(gpu=gpu(), torch=torch.__version__)
    print(f"{gpu()}, torch {torch.__version__}")
    for name in names or parts:
        begun = time.perf_counter()
        print(name, flush=True)
        try:
            FOUND[name] = parts[name]()
        except Exception:
            traceback.print_exc()
        print(f"  ({time.perf_counter() - begun:.0f} s)", flush=True)
        (folder / "measured.json").write_text(json.dumps(FOUND, indent=1))


# ---- beside predictions


def predict(path: Path) -> None:
    """Print the measured steps beside what `mk.estimate` and the played trace predict."""
    found = json.loads(path.read_text())
    machine = "8x-h200-nvlink" if "H200" in found["gpu"] else "8x-h100-nvlink"
    table = Table(title=f"{found['gpu']}, torch {found['torch']}: measured, and predicted / measured")
    titles = (
        "GPT",
        "batch",
        "precision",
        "plain loop",
        "mpkit",
        "estimate",
        "band",
        "played",
        "allocated",
        "estimate",
    )
    for column in (*titles, "played / run"):
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
