"""Naive DDP.

`DistributedDataParallel` (DDP) has no boss. Every rank has a model, an optimizer and its share of each batch. If all
begin with the same weights, and all take each step with the same gradient, they stay equal for ever, and what they
have to send is the gradients only.

Write the training loop of one rank, the naive way: after the backward, one all-reduce for each gradient.

Each rank made its model itself, **with random weights of its own**: before the first step everybody takes rank 0's
(`ctx.comm.broadcast(tensor)`, in place). `batches` are this rank's shares; those of all ranks are of one size. In the
end every rank's weights are those of serial training from rank 0's weights, whatever the optimizer: SGD or Adam.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import calls, payload
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.trace import Kind


# %% answer
def naive_ddp(
    ctx: mk.Context, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]
) -> None:
    """Train `model` by the mean squared error, a step for each of `batches`: (inputs, targets), this rank's shares."""
    ### BEGIN SOLUTION
    for parameter in model.parameters():
        ctx.comm.broadcast(parameter)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        for parameter in model.parameters():
            ctx.comm.all_reduce(parameter.grad)
            parameter.grad /= ctx.world_size
        optimizer.step()
    ### END SOLUTION


# %% checks
STEPS, SAMPLES = 3, 12
OPTIMIZERS = {"SGD": serial.sgd, "Adam": serial.adam}


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the weights after some steps from this rank's own weights."""
    assert callable(answer)
    model = serial.model(case.seed + 10 * ctx.rank)
    data = [serial.share(batch, ctx.rank, ctx.world_size) for batch in serial.batches(case, SAMPLES, STEPS)]
    answer(ctx, model, OPTIMIZERS[case["optimizer"]](model), data)
    return serial.weights(model)


def expected(case: Case) -> list[object]:
    """Return the weights of serial training from rank 0's weights."""
    optimizer = OPTIMIZERS[case["optimizer"]]
    trained = serial.train(serial.model(case.seed), serial.batches(case, SAMPLES, STEPS), optimizer=optimizer)
    return [trained["weights"]] * case.ranks


MODEL = list(serial.model(0).parameters())

EXERCISE = OnRanks(
    solution=naive_ddp,
    cases=(
        Case(2, 1, {"optimizer": "SGD"}),
        Case(3, 2, {"optimizer": "Adam"}),
        Case(4, 3, {"optimizer": "SGD"}),
    ),
    play=play,
    expected=expected,
    result="weights after 3 steps",
    budgets=(
        Budget("all-reduces", calls(Kind.ALL_REDUCE), STEPS * len(MODEL)),
        Budget("payload", payload, (STEPS + 1) * sum(p.nbytes for p in MODEL), "bytes"),
    ),
    after="02-data-parallel",
    place=30,
    start="Write the loop as if there were one rank: zero_grad, forward, loss, backward, step. Where in it do the "
    "ranks have to talk, and what has to happen before the loop?",
    mistakes=(
        Mistake(
            "each-begins-with-its-own-weights",
            (
                "All take the same steps. Do all begin at the same place?",
                "Every rank made its model with random weights of its own. The same gradients, added to different "
                "weights, leave them different for ever.",
                "Before the first step: `ctx.comm.broadcast(parameter)` for each parameter, which leaves rank 0's "
                "everywhere.",
            ),
            [
                (
                    "    for parameter in model.parameters():\n        ctx.comm.broadcast(parameter)\n    for",
                    "    for",
                )
            ],
        ),
        Mistake(
            "summed-not-averaged",
            (
                "With more ranks the weights are further off. What does all_reduce do with the gradients?",
                "It adds them up. A rank's loss is a mean over its share, so the gradient of the whole batch is the "
                "mean over ranks: divide by their number. Unlike the loss, this would still fall: too fast.",
            ),
            [("            parameter.grad /= ctx.world_size\n", "")],
        ),
        Mistake(
            "steps-before-it-communicates",
            (
                "In which order do the backward, the all-reduce and the step come?",
                "A step with the rank's own gradient leads each replica somewhere else; what is summed afterwards "
                "comes too late. Backward, all-reduce, step.",
            ),
            [
                ("        optimizer.step()\n", ""),
                (".backward()\n", ".backward()\n        optimizer.step()\n"),
            ],
        ),
        Mistake(
            "weights-averaged",
            (
                "With SGD it is right, with Adam it is not. What do you average, and is a step of Adam a multiple of "
                "the gradient?",
                "You let each rank step with its own gradient, and average the weights. That is the same only where "
                "a step is a linear function of the gradient. Average the gradients, before the step.",
            ),
            """
            def naive_ddp(
                ctx: mk.Context, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list
            ) -> None:
                for parameter in model.parameters():
                    ctx.comm.broadcast(parameter)
                for inputs, targets in batches:
                    optimizer.zero_grad()
                    F.mse_loss(model(inputs), targets).backward()
                    optimizer.step()
                    for parameter in model.parameters():
                        ctx.comm.all_reduce(parameter.data, op="mean")
            """,
            when=lambda seen: seen.is_finished and not seen.budget and seen.case["optimizer"] == "Adam",
        ),
        Mistake(
            "gradients-pile-up",
            (
                "The first step is right, the next ones are not. What is in `parameter.grad` before the backward?",
                "backward adds to what is there. Without `optimizer.zero_grad()` the gradients of the last step are in "
                "this one's.",
            ),
            [("        optimizer.zero_grad()\n", "")],
        ),
        Mistake(
            "broadcasts-in-every-step",
            (
                "The weights are right. How often does a rank need rank 0's weights?",
                "Replicas that begin alike and take the same steps stay alike. A broadcast of all weights in every "
                "step doubles what travels, and hides bugs: without it you would see that replicas part.",
                "One broadcast before the loop is enough.",
            ),
            [
                (
                    "    for parameter in model.parameters():\n        ctx.comm.broadcast(parameter)\n    for",
                    "    for",
                ),
                (
                    "        optimizer.zero_grad()\n",
                    "        optimizer.zero_grad()\n        for parameter in model.parameters():\n"
                    "            ctx.comm.broadcast(parameter)\n",
                ),
            ],
            when=lambda seen: seen.budget == "payload" and calls(Kind.BROADCAST)(seen) > len(MODEL),
        ),
    ),
    otherwise=(
        "Take the smallest case, 2 ranks and one step, and print the weights of both ranks before and after it. Are "
        "they equal? Are they those of serial training?",
    ),
)
