"""Recompute.

A forward keeps what its backward will need: the activations of every layer. GPipe keeps them of all micro-batches at
once. Instead, keep only each micro-batch's *input* to the stage, and do the forward again when the backward comes:

    forward i     x ──▶ output               kept: x
    backward i    x ──▶ output again ──▶ gradients            then nothing is kept

So at any time a rank holds m small inputs and the activations of one micro-batch, for a third more computation.
The second forward has to do what the first one did, to the last random number: the stage may have dropout.
`torch.get_rng_state()` and `torch.set_rng_state(state)` read and set where the random numbers are; after a backward
they must go on as if it had drawn none (`with torch.random.fork_rng():` puts them back).

Write it by hand, without torch.utils.checkpoint. Two ranks train with it, all forwards first.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; GPipe does so in each stage.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import peak
from mpkit.course.framework.memory import Memory
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.serial import fill
from mpkit.course.framework.staged import calls_the_library, checkpoint_by_hand, record_stage


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
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(case["dropout"]))
        for _ in range(LAYERS * case.ranks)
    ]
    whole = list(fill(nn.Sequential(*layers), case.seed))
    return [nn.Sequential(*whole[LAYERS * rank : LAYERS * (rank + 1)]) for rank in range(case.ranks)]


def batches(case: Case) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, (micro-batches, samples, width) each."""
    shape = (2, case["microbatches"], SAMPLES, WIDTH)
    x, y = torch.randn(shape, generator=case.generator(), dtype=torch.float64)
    return x, y


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run GPipe, all forwards and then all backwards; return the gradients of this rank's stage."""
    assert callable(answer)
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
    solution=Recompute,
    cases=(
        Case(2, 1, {"microbatches": 2, "dropout": 0.0}),
        Case(2, 2, {"microbatches": 8, "dropout": 0.0}),
        Case(2, 3, {"microbatches": 8, "dropout": 0.3}),
    ),
    play=play,
    expected=expected,
    result="the gradients of the stage",
    budgets=(Budget("peak of the activations of a rank", peak("activations"), enough, "bytes"),),
    after="01-pipeline-bubbles",
    place=90,
    start="In `forward`, keep x and run the stage without a graph (`torch.no_grad()`). In `backward`, take x again, "
    "run the stage once more, with a graph this time, and go backward from its output.",
    mistakes=(
        calls_the_library(
            """
            from torch.utils.checkpoint import checkpoint


            class Recompute:
                def __init__(self, stage: nn.Module) -> None:
                    self.stage = stage
                    self.kept = {}

                def forward(self, i: int, x: Tensor) -> Tensor:
                    x = x.detach().requires_grad_()
                    self.kept[i] = x, checkpoint(self.stage, x, use_reentrant=False)
                    return self.kept[i][1].detach()

                def backward(self, i: int, grad: Tensor) -> Tensor:
                    x, output = self.kept.pop(i)
                    output.backward(grad)
                    return x.grad
            """
        ),
        Mistake(
            "keeps-the-graph",
            (
                "The gradients are right. What does a rank still hold of each micro-batch when all forwards are done?",
                "An output with a graph holds the activations of all layers, for as long as somebody keeps the "
                "output. That is what recomputing is to avoid.",
                "Run the first forward under `torch.no_grad()`, and keep x only.",
            ),
            """
            class Recompute:
                def __init__(self, stage: nn.Module) -> None:
                    self.stage = stage
                    self.kept = {}

                def forward(self, i: int, x: Tensor) -> Tensor:
                    x.requires_grad_()
                    self.kept[i] = x, self.stage(x)
                    return self.kept[i][1]

                def backward(self, i: int, grad: Tensor) -> Tensor:
                    x, output = self.kept.pop(i)
                    output.backward(grad)
                    return x.grad
            """,
            when=lambda seen: seen.budget,
        ),
        Mistake(
            "keeps-the-inputs",
            (
                "The gradients are right. What is in your dictionary when the step is over?",
                "The input of every micro-batch, and it is needed no longer: `self.kept.pop(i)` takes it out.",
            ),
            [("self.kept.pop(i)", "self.kept[i]")],
        ),
        Mistake(
            "leaves-the-random-numbers-where-they-were",
            (
                "Each gradient is right. Which random numbers does the rank draw next, after a backward?",
                "Those that the micro-batch of this backward has drawn already: setting the state back changes it for "
                "everything after. `with torch.random.fork_rng():` around it restores it.",
            ),
            [
                (
                    "        with torch.random.fork_rng():\n            torch.set_rng_state(state)\n"
                    "            output =",
                    "        torch.set_rng_state(state)\n        output =",
                )
            ],
        ),
        Mistake(
            "draws-other-random-numbers",
            (
                "Without dropout all is right. What differs between the first forward and the second?",
                "The second forward drops other elements than the first: its gradients are those of another network. "
                "It has to draw the same random numbers.",
                "Keep `torch.get_rng_state()` before the first forward, and set it before the second, inside of "
                "`torch.random.fork_rng()`.",
            ),
            [("            torch.set_rng_state(state)\n", "")],
            when=lambda seen: seen.is_finished and seen.case["dropout"],
        ),
        Mistake(
            "input-without-a-gradient",
            (
                "What does `backward` return here, and what does the rank before need?",
                "The kept input is a plain tensor. Only if it asks for a gradient before the second forward has it "
                "one afterwards.",
                "`x = x.detach().requires_grad_()`",
            ),
            [("x.detach().requires_grad_()", "x.detach()")],
            when=lambda seen: "NoneType" in seen.error,
        ),
        Mistake(
            "second-forward-without-a-graph",
            (
                "From what should the backward go backward?",
                "Under `torch.no_grad()` a forward leaves no graph. The first one should not; the second one must.",
            ),
            [("torch.random.fork_rng():", "torch.random.fork_rng(), torch.no_grad():")],
            when=lambda seen: "does not require grad" in seen.error,
        ),
        Mistake(
            "keeps-the-output",
            (
                "The second forward should give what the first gave. What do you start it from?",
                "You run the stage on its own *output*. The input is what has to be kept.",
            ),
            [
                ("self.kept[i] = x, torch.get_rng_state()", "state = torch.get_rng_state()"),
                ("        return output\n", "        self.kept[i] = output, state\n        return output\n"),
            ],
        ),
    ),
    otherwise=(
        "Compare with serial training for one micro-batch: the output of the second forward, then the gradients.",
    ),
)
