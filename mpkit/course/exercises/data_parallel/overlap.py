"""Overlapped with the backward."""

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


def late(seen: Seen) -> float:
    """Count the all-reduces that were not started during a backward."""
    return _most(seen, Kind.ALL_REDUCE, lambda rank, op: _backward_of(rank, op) is None)


def waits(seen: Seen) -> float:
    """Count the waits during a backward."""
    return _most(seen, Kind.WAIT, lambda rank, op: _backward_of(rank, op) is not None)


def kept_back(seen: Seen) -> float:
    """Return the bytes that nobody had begun to send when the last gradient of their backward was complete."""

    def bytes_of(rank: Any, op: Any) -> float:
        backward = _backward_of(rank, op)
        in_time = backward is not None and any(
            op["start"] <= gradient["start"] <= backward["end"] for gradient in _spans(rank, "gradient")
        )
        return 0.0 if in_time else float(op["bytes"])

    return _most(seen, Kind.ALL_REDUCE, bytes_of)


def raced(seen: Seen) -> float:
    """Count the all-reduces that nobody had waited for when the optimizer's step began."""

    def is_open(rank: Any, op: Any) -> bool:
        steps = [step["start"] for step in _spans(rank, "step") if step["start"] >= op["start"]]
        return bool(op["end"] == 0 or op["end"] > min(steps, default=op["end"]))

    return _most(seen, Kind.ALL_REDUCE, is_open)


def _spans(rank: Any, name: str) -> list[Any]:
    """Return a rank's spans of that name."""
    return [op for op in rank.ops if rank.name(int(op["name"])) == name]


def _backward_of(rank: Any, op: Any) -> Any:
    """Return the backward during which an op was started; None if there is none."""
    return next((b for b in _spans(rank, "backward") if b["start"] <= op["start"] <= b["end"]), None)


def _most(seen: Seen, kind: Kind, of: Callable[[Any, Any], float]) -> float:
    """Return the largest sum over a rank's ops of a kind."""
    return float(max(sum(of(rank, op) for op in rank.ops if op["kind"] == kind) for rank in seen.ranks))


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
