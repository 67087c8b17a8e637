"""What recording costs: an op, and a training step with everything on; beside torch.profiler.

The step is a small GPT's on one thread, with AdamW. One model's steps are recorded and not in turn, some of each, so
that whatever else the machine does falls on both, and so does where in memory the model happens to lie.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

from mpkit.models import GPT
from mpkit.record.hooks import watch
from mpkit.record.recorder import Recorder
from mpkit.record.saved import saving
from mpkit.trace import Kind

OPS = 2000
PAIRS, WARM_UP, STEPS = 20, 3, 15
BUSY = 500_000  # ns


def measure() -> list[dict[str, Any]]:
    """Medians: microseconds an op, and the share by which a step takes longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return [*_ops(Path(folder)), *_steps(Path(folder))]
    finally:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------- an op


def _ops(folder: Path) -> Iterator[dict[str, Any]]:
    record = Recorder(folder, 0)

    def compute() -> Callable[[], None]:
        index = record.begin(Kind.FORWARD, "F", stage=1, microbatch=3, flops=1e9, nbytes=1000)
        return lambda: record.end(index)

    def message() -> Callable[[], None]:
        index = record.begin(Kind.SEND, group="0>1#3", number=5, peer=1, nbytes=1000, where="pipeline.py:100")
        return lambda: record.end(index)

    def profiled() -> Callable[[], None]:
        region = record_function("F")
        region.__enter__()
        return lambda: region.__exit__(None, None, None)

    ops = {
        "an op of no length": _cost(compute, busy=0),
        "an op of 0.5 ms": _cost(compute, busy=BUSY),  # long enough for a look at the CPU clock
        "communication": _cost(message, busy=0),
    }
    with profile(activities=[ProfilerActivity.CPU]):
        profiler = _cost(profiled, busy=0)
    for name, cost in ops.items():
        yield _row(f"record: begin and end of {name}", cost / 1e3, "us", cost / 2000, "of the limit of 2 us")
    first = next(iter(ops.values()))
    yield _row("record: the same by torch.profiler", profiler / 1e3, "us", profiler / first, "times mpkit's")


def _cost(begin: Callable[[], Callable[[], None]], *, busy: int) -> float:
    """Median ns of beginning and ending an op that keeps the core busy for so many ns."""
    clock = time.perf_counter_ns

    def once(begin: Callable[[], Callable[[], None]]) -> int:
        first = clock()
        end = begin()
        second = clock()
        while clock() < second + busy:
            pass
        third = clock()
        end()
        return clock() - third + second - first

    def nothing() -> Callable[[], None]:
        return lambda: None

    empty = statistics.median(once(nothing) for _ in range(OPS))
    return statistics.median(once(begin) for _ in range(OPS)) - empty


# ---------------------------------------------------------------- a step


class _Training:
    """A model and its steps, recorded while `record` is set."""

    def __init__(self, microbatches: int) -> None:
        torch.manual_seed(0)
        self.model = GPT(layers=2, width=128, heads=4, length=64)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.tokens = torch.randint(0, 256, (microbatches, 4, 65))
        self.record: Recorder | None = None
        self.number = 0

    def step(self) -> None:
        """Each micro-batch forward and backward, and the optimizer."""
        with self.record.step(self.number) if self.record else nullcontext():
            self.optimizer.zero_grad()
            for number, tokens in enumerate(self.tokens):
                if self.record:
                    self._recorded(self.record, number, tokens)
                else:
                    self._forward(tokens).backward()
            self.optimizer.step()
        self.number += 1

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def _recorded(self, record: Recorder, number: int, tokens: torch.Tensor) -> None:
        record.ledger.track(tokens, "activations")
        index = record.begin(Kind.FORWARD, "F", stage=0, microbatch=number, flops=1e9, nbytes=1000)
        with saving(record, 0, tokens.shape) as saved:
            loss = self._forward(tokens)
        record.ledger.track(loss, "activations")
        record.end(index)
        index = record.begin(Kind.BACKWARD, "B", stage=0, microbatch=number, flops=2e9, nbytes=2000)
        loss.backward()
        saved.release()
        record.end(index)


def _steps(folder: Path) -> Iterator[dict[str, Any]]:
    for microbatches, layers in ((1, False), (4, False), (1, True)):
        training = _Training(microbatches)
        place = folder / f"{microbatches}{layers}"
        place.mkdir()
        base, share = _pairs(training, _recording(training, Recorder(place, 0, layers=layers)))
        what = f"{microbatches} micro-batch{'es' * (microbatches > 1)}{', every layer too' * layers}"
        name = f"record: a step of {base * 1e3:.0f} ms, {what}"
        if layers:  # some dozen layers of a fraction of a millisecond each
            yield _row(name, 100 * share, "% longer", None, "off unless asked for")
        else:
            yield _row(name, 100 * share, "% longer", 50 * share, "of the limit of 2 %")
    training = _Training(1)
    base, share = _pairs(training, _profiling, pairs=2)
    yield _row(
        f"record: a step of {base * 1e3:.0f} ms by torch.profiler", 100 * share, "% longer", None, None
    )


def _recording(training: _Training, record: Recorder) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def on() -> Iterator[None]:
        watched = watch(record, training.model, training.optimizer)
        training.record = record
        yield
        training.record = None
        watched.close()

    return on


@contextmanager
def _profiling() -> Iterator[None]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_flops=True):
        yield


def _pairs(
    training: _Training, on: Callable[[], AbstractContextManager[None]], pairs: int = PAIRS
) -> tuple[float, float]:
    """Median seconds of a step without, and the share by which it takes longer with: the median over the pairs.

    Of the thread's CPU time: all of a step is on this thread, and other programs share the cores.
    """
    base, more = [], []
    for turn in range(pairs):
        times = {}
        for side in ("off", "on") if turn % 2 else ("on", "off"):
            with on() if side == "on" else nullcontext():
                for _ in range(WARM_UP):
                    training.step()
                times[side] = statistics.median(_time(training.step) for _ in range(STEPS))
        base.append(times["off"])
        more.append(times["on"] - times["off"])
    return statistics.median(base), statistics.median(more) / statistics.median(base)


def _time(step: Callable[[], None]) -> float:
    begin = time.thread_time()
    step()
    return time.thread_time() - begin


def _row(name: str, value: float, unit: str, ratio: float | None, against: str | None) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "ratio": ratio, "against": against}
