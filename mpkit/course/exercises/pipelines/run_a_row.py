"""Run a row of actions: GPipe and 1F1B on ranks."""

from collections.abc import Sequence

from mpkit.course.author import *
from mpkit.course.framework.serial import mlp
from mpkit.plan.schedule.schedules import one_f_one_b


# %% answer
def run_a_row(
    ctx: mk.Context,
    stage: nn.Module,
    row: list[str],
    inputs: list[Tensor],
    targets: list[Tensor],
    like: Tensor,
) -> None:
    """Run this rank's row of a pipeline step; leave the gradients in the parameters of `stage`.

    stage: this rank's part of the model; takes and gives (samples, width).
    row: this rank's actions, such as ["F0", "F1", "B0", "F2", "B1", "B2"].
    inputs: on rank 0, the input of each micro-batch; empty elsewhere.
    targets: on the last rank, the targets of each micro-batch; empty elsewhere.
    like: a tensor of a message's shape and dtype: `torch.empty_like(like)` makes a buffer to receive into.
    """
    first, last = ctx.rank == 0, ctx.rank == ctx.world_size - 1
    m = len(row) // 2
    ### BEGIN SOLUTION
    held: dict[int, tuple[Tensor, Tensor]] = {}
    outputs: dict[int, Any] = {}  # the sends of outputs that are under way
    gradients: list[Any] = []  # of gradients
    for action in row:
        kind, i = action[0], int(action[1:])
        if kind == "F":
            x = inputs[i] if first else ctx.comm.recv(torch.empty_like(like), ctx.rank - 1)
            x.requires_grad_(not first)
            output = stage(x)
            held[i] = x, output
            if not last:
                outputs[i] = ctx.comm.isend(output.detach(), ctx.rank + 1)
        else:
            x, output = held.pop(i)
            if last:
                loss = F.mse_loss(output, targets[i]) / m
                loss.backward()
            else:
                gradient = ctx.comm.recv(torch.empty_like(like), ctx.rank + 1)
                outputs.pop(i).wait()  # the next rank has used it
                output.backward(gradient)
                del gradient
            if not first:
                while gradients:
                    gradients.pop().wait()  # the one before
                gradients.append(ctx.comm.isend(x.grad, ctx.rank - 1))
        del x, output
    for work in gradients:
        work.wait()
    ### END SOLUTION


# %% checks
SAMPLES, WIDTH, LAYERS = 32, 16, 6

UNIT = SAMPLES * WIDTH * 8
"""Bytes of one micro-batch between two layers: of each activation, message, gradient."""


def stages(case: Case) -> list[nn.Sequential]:
    """Return one stage per rank, of `LAYERS` linear layers with tanh each."""
    layers = mlp(LAYERS * case.ranks, case.seed, WIDTH)
    return [nn.Sequential(*list(layers)[LAYERS * rank : LAYERS * (rank + 1)]) for rank in range(case.ranks)]


def batches(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Return the inputs and targets of each micro-batch, (samples, width)."""
    shape = (2, case["microbatches"], SAMPLES, WIDTH)
    xs, ys = torch.randn(shape, generator=case.generator(), dtype=torch.float64)
    return list(xs), list(ys)


def serial_gradients(case: Case) -> list[dict[str, Tensor | None]]:
    """Return the gradients of each stage, of the mean loss over all micro-batches, as one device computes them."""
    parts, (xs, ys) = stages(case), batches(case)
    whole = nn.Sequential(*parts)
    F.mse_loss(whole(torch.cat(xs)), torch.cat(ys)).backward()
    return [{name: parameter.grad for name, parameter in stage.named_parameters()} for stage in parts]


def observe_actions(stage: nn.Module, row: Sequence[str]) -> list[str]:
    """Return a list that fills as the stage works: "F0", "F1", "B0", numbered as the forwards of `row` are.

    >>> stage = nn.Linear(2, 2)
    >>> done = observe_actions(stage, ["F0", "F1", "B1", "B0"])
    >>> for output in reversed([stage(torch.ones(1, 2)), stage(torch.ones(1, 2))]):
    ...     output.sum().backward()
    >>> done
    ['F0', 'F1', 'B1', 'B0']
    """
    numbers = iter([action[1:] for action in row if action.startswith("F")])
    done: list[str] = []

    def forward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        number = next(numbers, "?")
        done.append(f"F{number}")
        if output.requires_grad:
            output.register_hook(lambda gradient: done.append(f"B{number}"))

    stage.register_forward_hook(forward)
    return done


HELD, LEFT_ALONE = "peak of the activations of a rank", "sends that a rank never waits for"


def rows_of(case: Case) -> list[list[str]]:
    """Return a row for each rank, in text: F0, B0. GPipe's backwards come in an order of their own."""
    p, m = case.ranks, case["microbatches"]
    if case["schedule"] == "gpipe":
        order = list(range(m))
        return [[f"F{i}" for i in order] + [f"B{i}" for i in order[1::2] + order[::2]]] * p
    return [[f"{action.kind}{action.microbatch}" for action in row] for row in one_f_one_b(p, m).rows]


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run one step; return what this rank did, and the gradients of its stage."""
    stage, (xs, ys), row = stages(case)[ctx.rank], batches(case), rows_of(case)[ctx.rank]
    done, like = observe_actions(record_stage(ctx, stage), row), torch.full_like(xs[0], torch.nan)
    first, last = ctx.rank == 0, ctx.rank == ctx.world_size - 1
    with Memory(ctx, stage.parameters()):
        answer(ctx, stage, list(row), xs if first else [], ys if last else [], like)
    gradients = {name: parameter.grad for name, parameter in stage.named_parameters()}
    return {"gradients": gradients, "actions": " ".join(done)}


def expected(case: Case) -> list[object]:
    """Return each rank's row, and the gradients of serial training, by stage."""
    return [
        {"gradients": each, "actions": " ".join(row)}
        for each, row in zip(serial_gradients(case), rows_of(case), strict=True)
    ]


def enough(case: Case) -> float:
    """Return the bytes of the activations of p micro-batches (of all m in GPipe), and of what the text adds."""
    live = case["microbatches"] if case["schedule"] == "gpipe" else min(case.ranks, case["microbatches"])
    return float((live * (LAYERS + 2) + 8) * UNIT)


def left_alone(seen: Seen) -> float:
    """Return how many sends nobody waited for, on the rank that has most of them."""
    most = 0
    for rank in seen.ranks:
        waited = {int(op["ref"]) for op in rank.ops if op["kind"] == Kind.WAIT}
        sends = [at for at, op in enumerate(rank.ops) if op["kind"] == Kind.SEND]
        most = max(most, sum(at not in waited for at in sends))
    return float(most)


EXERCISE = OnRanks(
    cases=(
        Case(2, 1, {"schedule": "gpipe", "microbatches": 1}),
        Case(3, 3, {"schedule": "gpipe", "microbatches": 5}),
        Case(2, 2, {"schedule": "1f1b", "microbatches": 16}),
        Case(4, 4, {"schedule": "1f1b", "microbatches": 6}),
    ),
    budgets=(
        Budget(HELD, peak("activations"), enough, "bytes"),
        Budget(LEFT_ALONE, left_alone, 0),
        Budget("messages that a rank sends", messages, lambda case: 2 * case["microbatches"]),
        Budget("collectives", collectives, 0),
    ),
)
