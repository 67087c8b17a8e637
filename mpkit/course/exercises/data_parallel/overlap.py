"""Overlapped with the backward."""

from __future__ import annotations

import numpy as np

from mpkit.course.author import *


# %% answer
class Overlapped:
    """Averages the gradients of `model` over all ranks while the backward runs."""

    def __init__(self, ctx: mk.Context, model: nn.Module) -> None:
        ### BEGIN SOLUTION
        self.ctx = ctx
        self.under_way = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.send)
        ### END SOLUTION

    def send(self, parameter: nn.Parameter) -> None:
        """`parameter.grad` is complete: let autograd call this for each parameter."""
        ### BEGIN SOLUTION
        self.under_way.append((parameter, self.ctx.comm.all_reduce(parameter.grad, async_op=True)))
        ### END SOLUTION

    def finish(self) -> None:
        """Make sure that every `parameter.grad` is the mean; called once the backward is over."""
        ### BEGIN SOLUTION
        for parameter, work in self.under_way:
            work.wait()
            parameter.grad /= self.ctx.world_size
        self.under_way = []
        ### END SOLUTION


# %% checks
STEPS, SAMPLES = 3, 12
FLOPS = 2e9  # as if the model were large: the backward takes 0.1 ms on the clock of the timeline

BYTES = STEPS * sum(p.nbytes for p in serial.model(0).parameters())
"""What the gradients of all steps are."""

WITHOUT_OVERLAP = {2: 500e-6, 3: 645e-6, 4: 790e-6}
"""Seconds on the virtual clock."""


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the weights after each of some steps: the trace has their backwards, gradients and optimizer steps."""
    weights = []
    model = serial.model(case.seed)

    def complete(parameter: nn.Parameter) -> None:
        with ctx.record.span("gradient"):
            pass

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(complete)
    optimizer = serial.sgd(model)
    overlapped = answer(ctx, model)
    for batch in serial.batches(case, SAMPLES, STEPS):
        x, y = serial.share(batch, ctx.rank, ctx.world_size)
        optimizer.zero_grad()
        loss = serial.mse(model(x), y)
        with ctx.record.span("backward", flops=FLOPS):
            loss.backward()
        overlapped.finish()
        with ctx.record.span("step"):
            optimizer.step()
        weights.append(serial.weights(model))
    return weights


def expected(case: Case) -> list[object]:
    """Return the weights of serial training after each step."""
    model, data = serial.model(case.seed), serial.batches(case, SAMPLES, STEPS)
    return [[serial.train(model, data[: step + 1])["weights"] for step in range(STEPS)]] * case.ranks


Spans = dict[str, Any]


def late(seen: Seen) -> float:
    """Count the all-reduces that were not started during a backward."""
    return _most(
        seen,
        lambda ops, spans: (ops["kind"] == Kind.ALL_REDUCE) & ~_in(ops["start"], *_times(spans["backward"])),
    )


def waits(seen: Seen) -> float:
    """Count the waits during a backward."""
    return _most(
        seen, lambda ops, spans: (ops["kind"] == Kind.WAIT) & _in(ops["start"], *_times(spans["backward"]))
    )


def kept_back(seen: Seen) -> float:
    """Return the bytes that nobody had begun to send when the last gradient of their backward was complete."""

    def of(ops: Any, spans: Spans) -> Any:
        begins, ends = _times(spans["backward"])
        gradients = spans["gradient"]["start"]
        last = gradients[np.searchsorted(gradients, ends) - 1]
        return ops["bytes"] * ((ops["kind"] == Kind.ALL_REDUCE) & ~_in(ops["start"], begins, last))

    return _most(seen, of)


def raced(seen: Seen) -> float:
    """Count the all-reduces that nobody had waited for when the optimizer's step began."""
    return _most(seen, lambda ops, spans: (ops["kind"] == Kind.ALL_REDUCE) & _open(ops, spans["step"]))


def _open(ops: Any, step: Any) -> Any:
    """Return, for each op, whether the first optimizer step after its start began before its end."""
    after = np.append(step["start"], np.iinfo(np.int64).max)
    return (ops["end"] == 0) | (ops["end"] > after[np.searchsorted(after, ops["start"])])


def _times(spans: Any) -> tuple[Any, Any]:
    return spans["start"], spans["end"]


def _in(times: Any, begins: Any, ends: Any) -> Any:
    """Return, for each time, whether one of the intervals has it."""
    return ((begins <= times[:, None]) & (times[:, None] <= ends)).any(1)


def _most(seen: Seen, of: Callable[[Any, Spans], Any]) -> float:
    """Return the largest sum over a rank's ops of what is counted."""
    sums = []
    for rank in seen.ranks:
        names = np.array([rank.name(int(name)) for name in rank.ops["name"]])
        spans = {name: rank.ops[names == name] for name in ("backward", "gradient", "step")}
        sums.append(of(rank.ops, spans).sum())
    return float(max(sums))


EXERCISE = OnRanks(
    cases=(Case(2, seed=1), Case(3, seed=2), Case(4, seed=3)),
    budgets=(
        Budget("all-reduces", calls(Kind.ALL_REDUCE), STEPS * len(list(serial.model(0).parameters()))),
        Budget("all-reduces started after the backward", late, 0),
        Budget("waits during the backward", waits, 0),
        Budget("bytes that wait for the last gradient", kept_back, BYTES / 2, "bytes"),
        Budget("all-reduces not waited for before the step", raced, 0),
        Budget("3 steps on the virtual clock", makespan, lambda case: WITHOUT_OVERLAP[case.ranks], "seconds"),
    ),
)
