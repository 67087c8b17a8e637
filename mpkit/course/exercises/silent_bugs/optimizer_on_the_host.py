"""Silent bug 7: an optimizer on the host.

To save memory on the device, master weights and the optimizer's states live in host memory (ZeRO-Offload). In each step
the averaged gradients go down to the host, the optimizer steps there, and the new weights come back up:

    device   forward, backward, all-reduce ──gradients──▶            ──▶ next forward
    host                                                 step ──weights──┘

The copies were moved around a little, for them to overlap. The loss falls, only a bit later than it used to.

`mk.compare("optimizer-on-the-host", train)` shows the losses, and the weights on the device after each step. Look
at the first *two* rows: after the first step, which weights does the device have?

Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", 2021. (It has a one-step delayed update
too, section 5.2, and says so.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Case, Mistake
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def train(ctx: mk.Context, model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Train for one step per batch; return the losses. `batches` are whole ones, (B, 6) and (B, 3), on every rank.

    model: on the device. In the end it has the weights of the last step.
    """
    device = list(model.parameters())
    host = [nn.Parameter(weight.detach().clone().cpu()) for weight in device]
    optimizer = torch.optim.SGD(host, lr=0.1, momentum=0.9, weight_decay=0.05)
    losses = []
    for inputs, targets in batches:
        mine = slice(ctx.rank, None, ctx.world_size)
        loss = F.mse_loss(model(inputs[mine]), targets[mine])
        loss.backward()
        # ---- gradients, to the host
        for weight, master in zip(device, host, strict=True):
            master.grad = ctx.comm.all_reduce(weight.grad, op="mean").cpu()
            weight.grad = None
        ### BEGIN SOLUTION
        # instead: # ---- weights, to the device
        # instead: for weight, master in zip(device, host, strict=True):
        # instead:     weight.data.copy_(master)
        # instead: # ---- step
        # instead: optimizer.step()
        # ---- step
        optimizer.step()
        # ---- weights, to the device
        for weight, master in zip(device, host, strict=True):
            weight.data.copy_(master)
        ### END SOLUTION
        losses.append(ctx.comm.all_reduce(loss.detach(), op="mean").item())
    return losses


# %% checks
SAMPLES = 48


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the losses and the device's weights."""
    assert callable(answer)
    model = serial.model(case.seed)
    return serial.outcome(answer(ctx, model, serial.batches(case, SAMPLES, case["steps"])), model)


def expected(case: Case) -> list[serial.Outcome]:
    """Return what serial training gives."""
    return [serial.train(serial.model(case.seed), serial.batches(case, SAMPLES, case["steps"]))] * case.ranks


EXERCISE = OnRanks(
    solution=train,
    cases=(Case(2, 1, {"steps": 4}), Case(3, 2, {"steps": 4}), Case(4, 3, {"steps": 5})),
    play=play,
    expected=expected,
    result="losses and weights",
    after="03-zero",
    place=70,
    start="Run the program as it is, with `mk.compare`, and compare the first two losses with those of "
    "serial training. Which weights does the second forward use?",
    mistakes=(
        Mistake(
            "still-a-step-late",
            (
                "The gradients of the first step are right, and yet all weights on the device differ from serial "
                "training after it. By how much have they moved in the first step?",
                "Not at all: they are the weights from before the step. What is copied to the device are master "
                "weights that the optimizer has not changed yet, so each forward runs with weights that are one step "
                "old.",
                "First `optimizer.step()` on the host, then copy the master weights to the device.",
            ),
            [
                ("        # ---- step\n        optimizer.step()\n", ""),
                ("weight.data.copy_(master)\n", "weight.data.copy_(master)\n        optimizer.step()\n"),
            ],
        ),
        Mistake(
            "never-comes-back",
            (
                "Now the weights on the device never move. Who steps, and on what?",
                "The optimizer changes the master weights, on the host; the model computes with its own, on the "
                "device. After each step they have to be copied up.",
            ),
            [
                (
                    "        for weight, master in zip(device, host, strict=True):\n"
                    "            weight.data.copy_(master)\n",
                    "",
                )
            ],
        ),
        Mistake(
            "steps-twice",
            (
                "How many optimizer steps does a batch stand for?",
                "A second `optimizer.step()` brings fresh weights up, and moves the master weights twice with one "
                "gradient. Change the order, and step once.",
            ),
            [
                (
                    "            weight.data.copy_(master)\n",
                    "            weight.data.copy_(master)\n        optimizer.step()\n",
                )
            ],
        ),
        Mistake(
            "refreshes-one-rank",
            (
                "On which ranks are the weights right?",
                "Every rank has an optimizer and a device of its own. Weights that come up on one rank only leave "
                "the others' forwards with old ones, and their gradients go into everybody's mean.",
            ),
            [
                (
                    "            weight.data.copy_(master)\n",
                    "            if ctx.rank == 0:\n                weight.data.copy_(master)\n",
                )
            ],
        ),
        Mistake(
            "steps-on-the-device-too",
            (
                "The device's weights have moved now. By what: by momentum and weight decay as well?",
                "A plain step on the device, with the gradient that is there, is not what the optimizer does on the "
                "host: the two copies part. There is one truth, the master weights: copy them.",
            ),
            [
                (
                    "            weight.data.copy_(master)\n",
                    "            weight.data.sub_(0.1 * master.grad)\n",
                )
            ],
        ),
    ),
    otherwise=(
        "Print one weight on the device and on the host: before the step, after the step, and after the copies. In "
        "which of these moments do they have to be equal?",
    ),
)
