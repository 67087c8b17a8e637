"""What recording costs: per op, and per training step with everything recorded.

The step is that of a small GPT on one thread, with AdamW. A model's steps are run in turn, some recorded and some not,
so that other load on the machine, and the place of the model in memory, affect both alike.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.pairing import Row, row
from mpkit.models import GPT
from mpkit.trace import Kind
from mpkit.trace.record.hooks import watch
from mpkit.trace.record.recorder import Recorder

OPS = 2000
PAIRS, WARM_UP, STEPS = 20, 3, 15
BUSY = 500_000  # ns


def measure() -> list[Row]:
    """Measure medians: microseconds per op, and the fraction by which a step takes longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return [*_ops(Path(folder)), *_steps(Path(folder))]
    finally:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------- an op


def _ops(folder: Path) -> Iterator[Row]:
    record = Recorder(folder, 0)

    def compute() -> Callable[[], None]:
        index = record.begin(Kind.FORWARD, "F", stage=1, microbatch=3, flops=1e9, nbytes=1000)
        return lambda: record.end(index)

    def message() -> Callable[[], None]:
        index = record.begin(Kind.SEND, group="0>1#3", number=5, peer=1, nbytes=1000, where="pipeline.py:100")
        return lambda: record.end(index)

    ops = {
        "an op of no length": _cost(compute, busy=0),
        "an op of 0.5 ms": _cost(compute, busy=BUSY),  # long enough to need a reading of the CPU clock
        "communication": _cost(message, busy=0),
    }
    for name, cost in ops.items():
        yield row(f"record: begin and end of {name}", cost / 1e3, "us", cost / 2000, "of the limit of 2 us")


def _cost(begin: Callable[[], Callable[[], None]], *, busy: int) -> float:
    """Measure the median ns to begin and end an op that keeps the core busy for `busy` ns."""
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
    """A model and its steps, which are recorded while `record` is set."""

    def __init__(self, microbatches: int) -> None:
        torch.manual_seed(0)
        self.model = GPT(layers=2, width=128, heads=4, length=64)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.tokens = torch.randint(0, 256, (microbatches, 4, 65))
        self.record: Recorder | None = None
        self.number = 0

    def step(self) -> None:
        """Run each micro-batch forward and backward, and then the optimizer."""
        with self.record.step(self.number) if self.record else nullcontext():
            if self.record:
                self.record.begin_memory(self.tokens.shape)
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
        with record.memory.saving():
            loss = self._forward(tokens)
        record.ledger.track(loss, "activations")
        record.end(index)
        index = record.begin(Kind.BACKWARD, "B", stage=0, microbatch=number, flops=2e9, nbytes=2000)
        loss.backward()
        record.end(index)


def _steps(folder: Path) -> Iterator[Row]:
    for microbatches, layers in ((1, False), (4, False), (1, True)):
        training = _Training(microbatches)
        place = folder / f"{microbatches}{layers}"
        place.mkdir()
        base, share = _pairs(training, _recording(training, Recorder(place, 0, layers=layers)))
        what = f"{microbatches} micro-batch{'es' * (microbatches > 1)}{', every layer too' * layers}"
        name = f"record: a step of {base * 1e3:.0f} ms, {what}"
        if layers:  # some dozen layers of a fraction of a millisecond each
            yield row(name, 100 * share, "% longer", None, "off unless asked for")
        else:
            yield row(name, 100 * share, "% longer", 50 * share, "of the limit of 2 %")


def _recording(training: _Training, record: Recorder) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def on() -> Iterator[None]:
        watched = watch(record, training.model, training.optimizer)
        training.record = record
        yield
        training.record = None
        watched.close()

    return on


def _pairs(
    training: _Training, on: Callable[[], AbstractContextManager[None]], pairs: int = PAIRS
) -> tuple[float, float]:
    """Measure the median seconds of a plain step, and the median fraction by which a recorded step takes longer.

    It measures the thread's CPU time: a step runs entirely on this thread, and other programs share the cores.
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
