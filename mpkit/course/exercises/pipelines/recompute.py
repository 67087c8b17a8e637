"""Recompute."""

import weakref

from mpkit.course.author import *
from mpkit.course.framework.serial import mlp


# %% answer
class Recompute:
    """A stage that keeps nothing of a micro-batch but its input."""

    def __init__(self, stage: nn.Module) -> None:
        self.stage = stage
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, i: int, x: Tensor) -> Tensor:
        """Return micro-batch i's output, (samples, width), from its input x, (samples, width)."""
        ### BEGIN SOLUTION
        self.kept[i] = x, torch.get_rng_state()
        with torch.no_grad():
            output: Tensor = self.stage(x)
        return output
        ### END SOLUTION

    def backward(self, i: int, grad: Tensor) -> Tensor:
        """Return the gradient of micro-batch i's input from its output's; the parameters' gradients go to `.grad`."""
        ### BEGIN SOLUTION
        x, state = self.kept.pop(i)
        x = x.detach().requires_grad_()
        with torch.random.fork_rng():
            torch.set_rng_state(state)
            output = self.stage(x)
        output.backward(grad)
        given: Tensor = x.grad
        return given
        ### END SOLUTION


# %% checks
SAMPLES, WIDTH, LAYERS = 16, 32, 4
KEPT = "inputs that are kept after all backwards"
GOES_ON = "random numbers go on as if the backwards had drawn none"


def stages(case: Case) -> list[nn.Sequential]:
    """Return one stage per rank: linear layers with tanh, and dropout if the case has it."""
    layers = mlp(LAYERS * case.ranks, case.seed, WIDTH, nn.Dropout(case["dropout"]))
    return [nn.Sequential(*list(layers)[LAYERS * rank : LAYERS * (rank + 1)]) for rank in range(case.ranks)]


def batches(case: Case) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, (micro-batches, samples, width) each."""
    shape = (2, case["microbatches"], SAMPLES, WIDTH)
    x, y = torch.randn(shape, generator=case.generator(), dtype=torch.float64)
    return x, y


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run GPipe, all forwards and then all backwards; return the gradients of this rank's stage."""
    stage, (xs, ys) = stages(case)[ctx.rank], batches(case)
    first, last = ctx.rank == 0, ctx.rank == case.ranks - 1
    torch.manual_seed(ctx.rank)
    record_stage(ctx, stage, microbatches=case["microbatches"])
    with Memory(ctx, stage.parameters()), checkpoint_by_hand():
        again, gradients, inputs, on_its_way = answer(stage), [], [], {}
        for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
            x = x.clone() if first else ctx.comm.recv(torch.empty_like(x), ctx.rank - 1)
            output = again.forward(i, x)
            inputs.append(weakref.ref(x))
            if last:
                output = output.detach().requires_grad_()
                torch.autograd.backward(F.mse_loss(output, y))
                gradients.append(output.grad)
            else:
                ctx.comm.send(output, ctx.rank + 1)
                on_its_way[i] = output  # as if the message took long
            del x, output
        state, goes_on = torch.get_rng_state(), True
        for i in range(case["microbatches"]):
            on_its_way.pop(i, None)
            grad = gradients[i] if last else ctx.comm.recv(torch.empty_like(xs[0]), ctx.rank + 1)
            assert grad is not None
            grad = again.backward(i, grad)
            goes_on &= torch.equal(state, torch.get_rng_state())
            if not first:
                ctx.comm.send(grad, ctx.rank - 1)
            del grad
    kept = sum(x() is not None for x in inputs)
    return {
        KEPT: kept,
        GOES_ON: goes_on,
        **{name: parameter.grad for name, parameter in stage.named_parameters()},
    }


def expected(case: Case) -> list[object]:
    """Return the serial gradients of stages that draw the same random numbers."""
    parts, (xs, ys) = stages(case), batches(case)
    outputs = list(xs)
    with torch.random.fork_rng():
        for rank, stage in enumerate(parts):
            torch.manual_seed(rank)
            outputs = [stage(x) for x in outputs]
    for output, y in zip(outputs, ys, strict=True):
        torch.autograd.backward(F.mse_loss(output, y))
    return [
        {KEPT: 0, GOES_ON: True, **{name: p.grad for name, p in stage.named_parameters()}} for stage in parts
    ]


def enough(case: Case) -> float:
    """Return enough bytes for two tensors per micro-batch, and for all that the backward of one makes."""
    dropout = bool(case["dropout"])
    of_one = LAYERS * (4 + 3 * dropout)
    return float((2 * case["microbatches"] + of_one + 2) * SAMPLES * WIDTH * 8)


EXERCISE = OnRanks(
    cases=(
        Case(2, 1, {"microbatches": 2, "dropout": 0.0}),
        Case(2, 2, {"microbatches": 8, "dropout": 0.0}),
        Case(2, 3, {"microbatches": 8, "dropout": 0.3}),
    ),
    budgets=(Budget("peak of the activations of a rank", peak("activations"), enough, "bytes"),),
)
