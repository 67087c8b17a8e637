"""What single calls cost, and how far predictions are from runs: one function per row or group of rows.

    estimate       `mk.estimate` of a further plan, memory included, beside the first one of a fresh process; and
                   `mk.advise` in a fresh process, imports included
    predicted      step times that `Run.what_if` predicts beside runs of the changed plans, on the virtual clock
    replay         operations per second that a replay puts on the clock; actions per second of `mk.simulate`
    read           a profiler's trace, imported in a process of its own, beside `json.loads` of its events
    proof          50 steps with verify="first" beside verify=False
    watch          a watched DDP step beside the same unwatched
    record         what recording adds to an op

proof and watch run on a GPU where there is one. Both sides of a ratio alternate within one run, since a machine's speed
drifts; medians are shown.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import mpkit as mk
from benchmarks.pairing import Row, row
from mpkit.data import text_batches
from mpkit.models import GPT, MLP, next_token_loss
from mpkit.timeline.replay import replay
from mpkit.trace import Kind
from mpkit.trace.record.recorder import Recorder


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4)


# ---------------------------------------------------------------- predictions

MODELS = {
    "Llama 3 8B on 8": ("llama3-8b", "8x-h100-nvlink", 64, 8),
    "Llama 3 70B on 64": ("llama3-70b", "8x8-h100-ndr", 512, 64),
    "Llama 3 405B on 1,024": ("llama3-405b", "128x8-h100-ndr", 2048, 1024),
}
"""By title: model, machine, global batch and ranks."""
FRESH = """
import time
begun = time.perf_counter()
import mpkit as mk
found = mk.estimate({0!r}, mk.Plan(dp={3}, zero=3, precision="bf16"), {1!r}, global_batch={2}, sequence=8192)
found.step_time, found.memory[0]
print(time.perf_counter() - begun)
"""
SEARCH = """
import time
begun = time.perf_counter()
import mpkit as mk
found = mk.advise({0!r}, {1!r}, global_batch={2}, sequence=8192)
str(found)
print(time.perf_counter() - begun, found.considered)
"""


def estimate() -> Iterator[Row]:
    """Measure one estimate of each model, among all divisions of its batch by tp, pp and dp; then the search."""
    for title, (model, machine, batch, ranks) in MODELS.items():
        plans = [
            mk.Plan(
                tp=tp, pp=pp, dp=ranks // tp // pp, schedule="1f1b", sequence_parallel=tp > 1, zero=zero,
                precision="bf16", microbatches=batch * tp * pp // ranks,
            )
            for tp, pp, zero in product((1, 2, 4, 8), (1, 2, 4, 8), (0, 1))
            if ranks % (tp * pp) == 0 and batch * tp * pp // ranks >= pp
        ]  # fmt: skip
        code = [sys.executable, "-c", FRESH.format(model, machine, batch, ranks)]
        cold = statistics.median(float(subprocess.check_output(code)) for _ in range(3))
        hardware = mk.hardware(machine)

        def every(plans: list[mk.Plan] = plans, asked: Any = (model, hardware, batch, ranks)) -> None:
            for plan in plans:
                found = mk.estimate(asked[0], plan, asked[1], global_batch=asked[2], sequence=8192)
                _ = found.step_time, found.memory[asked[3] - 1]

        every()
        warm = _seconds(every) / len(plans)
        against = f"of the first in a fresh process, imports included: {cold:.2f} s"
        yield row(f"estimate: {title} ranks, a further plan", 1e3 * warm, "ms", warm / cold, against)
        code = [sys.executable, "-c", SEARCH.format(model, machine, 4 * batch if ranks == 8 else batch)]
        seconds, considered = map(float, subprocess.check_output(code, text=True).split())
        yield row(f"advise: {title} ranks, {considered:,.0f} plans, from cold", seconds, "s")


STEPS, ROUNDS, WITHIN = 8, 3, 0.15
CHANGES: tuple[tuple[mk.Plan, dict[str, Any]], ...] = (
    (mk.Plan.gpipe(2, 4), {"microbatches": 16}),
    (mk.Plan.gpipe(2, 8), {"schedule": "1f1b"}),
    (mk.Plan.pipeline("1f1b", 2, 8), {"schedule": "zb_h1"}),
    (mk.Plan.gpipe(2, 8, cut=[2]), {"cut": "balanced"}),
    (mk.Plan.pipeline("1f1b", 2, 8), {"ranks": 4}),
    (mk.Plan.ddp(2), {"ranks": 4}),
    (mk.Plan.ddp(2, bucket_mb=1), {"bucket_mb": 25}),
    (mk.Plan.zero(1, 2), {"zero": 3}),
    (mk.Plan.gpipe(2, 8), {"recompute": "full"}),
)


def predicted() -> Iterator[Row]:
    """Measure changes of a plan as `Run.what_if` predicts them, beside runs of the changed plans."""
    torch.manual_seed(0)
    model = GPT(layers=8, width=192, heads=4, length=64)
    tokens = torch.randint(0, 256, (32, 65))
    data = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]
    times: list[list[tuple[float, float]]] = [[] for _ in CHANGES]
    with mk.Cluster(2, device="cpu") as cluster:

        def run(plan: mk.Plan) -> Any:
            how: dict[str, Any] = {
                "loss": next_token_loss,
                "optimizer": _adamw,
                "steps": STEPS,
                "show": False,
            }
            return cluster.resized(plan.ranks).train(model, data, plan, **how).wait()

        for _ in range(ROUNDS):
            for found, (plan, change) in zip(times, CHANGES, strict=True):
                asked = run(plan).what_if(**change)
                timeline = run(asked.plan).timeline(clock="virtual")
                took = statistics.median(timeline.step(number).step_time for number in timeline.steps[1:])
                found.append((asked.step_time, took))
    ratios = []
    for (plan, change), found in zip(CHANGES, times, strict=True):
        guess, took = (statistics.median(pair[side] for pair in found) for side in (0, 1))
        ratios.append(statistics.median(a / b for a, b in found))
        words = ", ".join(f"{name}={value}" for name, value in change.items())
        against = f"of the changed plan's run: {took * 1e3:.3g} ms"
        yield row(f"what if {words}: {plan!r}", guess, "s", ratios[-1], against)
    within = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
    yield row(f"what if: within {WITHIN:.0%} of the run", within, f"of {len(ratios)}")


# ---------------------------------------------------------------- timelines


def replays() -> Iterator[Row]:
    """Measure the CPU time of a replay and of a simulation; other processes may use the machine meanwhile."""

    def best(act: Callable[[], object]) -> float:
        times = []
        for _ in range(3):
            began = time.process_time()
            act()
            times.append(time.process_time() - began)
        return min(times)

    model, data = GPT(layers=8, width=32, length=16), text_batches(batch=64, length=16, steps=20)
    with mk.Cluster(4, device="cpu") as cluster:
        how: dict[str, Any] = {"loss": next_token_loss, "optimizer": _adamw, "steps": 20, "show": False}
        trace = cluster.train(model, data, mk.Plan.gpipe(4, 64), **how).wait().trace
    rate = len(trace) / best(lambda: replay(trace))
    yield row("replay: a run of GPipe, 4 ranks x 64 micro-batches", rate, "ops/s", rate / 2e5, "of 200,000")
    plan = mk.Plan.gpipe(8, 512)
    rate = 2 * 8 * 512 / best(lambda: mk.simulate(plan))
    yield row("simulate: GPipe of 8 stages and 512 micro-batches", rate, "actions/s")


MEGABYTES = 200
IMPORT = """
import resource, sys, time
import mpkit as mk
began = time.perf_counter()
trace = mk.open(sys.argv[1])
print(len(trace), time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def read() -> Iterator[Row]:
    """Measure the import of a profiler's trace whose events are repeated until the file is large."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(12)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as profiler:
        for _ in range(3):
            model(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    with tempfile.TemporaryDirectory() as folder:
        one, many = Path(folder) / "one.json", Path(folder) / "many.json"
        profiler.export_chrome_trace(str(one))
        events = json.loads(one.read_text())["traceEvents"]
        events = [event for event in events if "ts" in event and event.get("cat") != "Trace"]
        length = max(event["ts"] + event.get("dur", 0) for event in events) - min(
            event["ts"] for event in events
        )
        with many.open("w") as file:
            file.write('{"schemaVersion": 1, "traceEvents": [\n')
            while True:
                lines = [json.dumps(event) for event in events]
                file.write(",\n".join(lines))
                if file.tell() > MEGABYTES * 1e6:
                    break
                file.write(",\n")
                for event in events:
                    event["ts"] += length
            file.write("]}")
        plain = (
            _seconds(lambda: [json.loads(line) for line in lines])
            * many.stat().st_size
            / sum(map(len, lines))
        )
        done = subprocess.check_output([sys.executable, "-c", IMPORT, str(many)], text=True)
        ops, took, peak = (float(word) for word in done.split())
        size = many.stat().st_size
    name = f"import: {size / 1e6:,.0f} MB of JSON, {ops:,.0f} ops"
    yield row(name, size / 1e6 / took, "MB/s", took / plain, f"json.loads of each event: {plain:.1f} s")
    yield row("import: memory at the peak", peak / 1e9, "GB", peak / size, "the file")


# ---------------------------------------------------------------- runs


def proof() -> Iterator[Row]:
    """Measure whole runs, from `train` to the end of `wait`, in pairs whose order alternates."""
    made = torch.Generator().manual_seed(0)
    points = [(torch.randn(64, 64, generator=made), torch.randn(64, 8, generator=made)) for _ in range(50)]
    text = text_batches(batch=16, length=64, steps=50)
    cases: dict[str, tuple[nn.Module, Any, Any, mk.Plan]] = {
        "MLP, DDP": (MLP(64, 8, width=256, layers=6), points, nn.functional.mse_loss, mk.Plan.ddp(2)),
        "GPT with dropout, ZeRO-3": (
            GPT(layers=4, width=128, dropout=0.1), text, next_token_loss, mk.Plan.zero(3, 2),
        ),
        "GPT, GPipe": (GPT(layers=4, width=128), text, next_token_loss, mk.Plan.gpipe(2, 4)),
    }  # fmt: skip
    with mk.Cluster(2) as cluster:
        for name, (model, data, loss, plan) in cases.items():
            times: dict[Any, list[float]] = {"first": [], False: []}
            steps = 0
            for number in range(6):
                for verify in sorted(times, key=bool, reverse=bool(number % 2)):
                    began = time.perf_counter()
                    run = cluster.train(
                        model, data, plan, loss=loss, optimizer=_adamw, steps=50, verify=verify, show=False
                    ).wait()
                    times[verify].append(time.perf_counter() - began)
                    steps = max(steps, len(run.proof.steps))
            ours, plain = times["first"][1:], times[False][1:]
            ratio = statistics.median(a / b for a, b in zip(ours, plain, strict=True))
            against = f"of verify=False: {statistics.median(plain):.3g} s"
            yield row(
                f"proof: {name}, {steps} of 50 steps verified", statistics.median(ours), "s", ratio, against
            )


def _ddp_step(ctx: Any) -> float:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(192), nn.Linear(192, 384), nn.GELU(), nn.Linear(384, 192))
        for _ in range(8)
    ]
    model = DistributedDataParallel(nn.Sequential(*blocks).to(ctx.device), bucket_cap_mb=1)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(64, 192, device=ctx.device)

    def step() -> None:
        dist.barrier()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()

    return statistics.median([_seconds(step) for _ in range(60)][10:])


def watch() -> Iterator[Row]:
    """Measure a DDP step of some 10 ms, watched and not, in fresh processes with the same seed."""
    with mk.Cluster(2) as cluster:
        steps = [[max(cluster.run(_ddp_step, watch=watch)) for watch in (True, False)] for _ in range(11)]
    ratio = statistics.median(watched / plain for watched, plain in steps)
    against = f"of the same unwatched: {statistics.median(plain for _, plain in steps) * 1e3:.3g} ms"
    yield row(
        "watch: a DDP step, 2 ranks", statistics.median(watched for watched, _ in steps), "s", ratio, against
    )


def record() -> Iterator[Row]:
    """Measure the median time to begin and end an op, beside the limit of 2 us."""
    with tempfile.TemporaryDirectory() as folder:
        yield from _ops(Recorder(Path(folder), 0))


def _ops(record: Recorder) -> Iterator[Row]:
    def compute() -> int:
        return record.begin(Kind.FORWARD, "F", stage=1, microbatch=3, flops=1e9, nbytes=1000)

    def message() -> int:
        return record.begin(Kind.SEND, group="0>1#3", number=5, peer=1, nbytes=1000, where="pipeline.py:100")

    def cost(begin: Callable[[], int], end: Callable[[int], object], busy: int) -> float:
        """Return the median ns to begin and end an op that keeps the core busy for `busy` ns."""
        clock, times = time.perf_counter_ns, []
        for _ in range(2000):
            first = clock()
            index = begin()
            second = clock()
            while clock() < second + busy:
                pass
            third = clock()
            end(index)
            times.append(clock() - third + second - first)
        return statistics.median(times)

    for name, begin, busy in (
        ("an op of no length", compute, 0),
        ("an op of 0.5 ms", compute, 500_000),  # long enough to need a reading of the CPU clock
        ("communication", message, 0),
    ):
        took = cost(begin, record.end, busy) - cost(lambda: 0, lambda index: index, busy)
        yield row(f"record: begin and end of {name}", took / 1e3, "us", took / 2000, "of the limit of 2 us")


def measure() -> Iterator[Row]:
    """Yield the rows; `python -m benchmarks costs proof` yields those of one function."""
    every = (estimate, predicted, replays, read, proof, watch, record)
    for function in [each for each in every if each.__name__ in sys.argv[1:]] or every:
        yield from function()
