"""Mixed precision by hand: fp32 master weights.

A model in bf16 takes half the memory and computes several times as fast. But bf16 has 8 bits of mantissa: next to a
weight of 1, an update of 0.001 disappears in rounding. So the *master weights*, and the optimizer, are kept in fp32:

    1. once     a master is an fp32 copy of a weight; the optimizer has the masters
    2. region   forward in bf16: model(inputs as bf16), as inside `torch.autocast`
    3. loss     out of the region, in fp32: outputs and targets are fp32
    4. backward, which leaves bf16 gradients on the model's weights
    5. step     of the masters, with these gradients in fp32
    6. copy     each master into its weight, rounded to bf16

Train `model`, whose weights are bf16 and have to stay so; return the losses, one per step. `make_optimizer(masters)`
makes an Adam for a list of tensors, `loss_fn(outputs, targets)` is the loss. The checks compare losses and weights with
a training in which every phase is written out, and look at the dtypes: those that the layers and the loss see, and
those that the optimizer has.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, sections 3.1 and 3.3.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.equal import difference
from mpkit.course.framework.exercise import Case, Mistake
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen


# %% answer
def train(
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> list[float]:
    """Train `model`, whose weights are bf16, in place, a step per batch of fp32 (inputs, targets); return losses."""
    ### BEGIN SOLUTION
    weights = list(model.parameters())
    masters = [weight.detach().float() for weight in weights]
    optimizer = make_optimizer(masters)
    losses = []
    for inputs, targets in batches:
        outputs = model(inputs.bfloat16())
        loss = loss_fn(outputs.float(), targets)
        model.zero_grad()
        loss.backward()
        for weight, master in zip(weights, masters, strict=True):
            master.grad = weight.grad.float()
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
        losses.append(loss.item())
    return losses
    ### END SOLUTION


# %% checks
STEPS, SAMPLES = 12, 8


def model(case: Case) -> nn.Module:
    """Return a model whose weights are bf16."""
    return serial.model(case.seed).bfloat16()


def batches(case: Case) -> list[serial.Batch]:
    """Return batches in fp32."""
    return [(x.float(), y.float()) for x, y in serial.batches(case, SAMPLES, STEPS)]


def optimizer_of(tensors: Any) -> torch.optim.Optimizer:
    """Return an Adam whose steps are smaller than what bf16 can tell apart."""
    return torch.optim.Adam(list(tensors), lr=5e-4, eps=1e-3)


def relative_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss that is another one if outputs and targets are swapped."""
    return ((outputs - targets) ** 2 / (1 + targets**2)).mean()


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return losses, weights, and the dtypes that layers, loss and optimizer have seen."""
    assert callable(answer)
    trained, dtypes = model(case), {"layers": set(), "loss": set(), "optimizer": set()}

    def watch(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        dtypes["layers"].add(str(output.dtype))

    def make_optimizer(tensors: Any) -> torch.optim.Optimizer:
        made = optimizer_of(tensors)
        dtypes["optimizer"] |= {str(each.dtype) for each in made.param_groups[0]["params"]}
        return made

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        dtypes["loss"] |= {str(outputs.dtype), str(targets.dtype)}
        return relative_error(outputs, targets)

    for layer in trained.children():
        layer.register_forward_hook(watch)
    losses = answer(trained, batches(case), make_optimizer, loss_fn)
    result = {"losses": losses, "weights": serial.weights(trained)}
    kinds = {name: sorted(each) for name, each in dtypes.items()}
    return {"dtypes": {**kinds, "weights": sorted({str(p.dtype) for p in trained.parameters()})}, **result}


def expected(case: Case) -> list[dict[str, object]]:
    """Return the same, with every phase written out: the model in fp32 computes with weights that are rounded."""
    trained = model(case)
    masters = [weight.detach().float().requires_grad_() for weight in trained.parameters()]
    optimizer, losses = optimizer_of(masters), []
    for x, y in batches(case):
        rounded = [master.detach().bfloat16().requires_grad_() for master in masters]
        names = [name for name, _ in trained.named_parameters()]
        out = torch.func.functional_call(trained, dict(zip(names, rounded, strict=True)), (x.bfloat16(),))
        loss = relative_error(out.float(), y)
        for master, grad in zip(masters, torch.autograd.grad(loss, rounded), strict=True):
            master.grad = grad.float()
        optimizer.step()
        losses.append(loss.item())
    final = {
        name: master.detach().bfloat16()
        for (name, _), master in zip(trained.named_parameters(), masters, strict=True)
    }
    fp32, bf16 = ["torch.float32"], ["torch.bfloat16"]
    dtypes = {"layers": bf16, "loss": fp32, "optimizer": fp32, "weights": bf16}
    return [{"dtypes": dtypes, "losses": losses, "weights": final}]


def dtype_of(seen: Seen, what: str) -> str:
    """Return the first dtype that a part has seen and should not have; "" if there is none."""
    if seen.got is None:
        return ""
    right, got = seen.expected[0]["dtypes"][what], seen.got[0]["dtypes"][what]
    return next((each for each in got if each not in right), "")


def only(seen: Seen, count: int) -> bool:
    """Return whether exactly the first so many losses are right."""
    assert seen.got is not None
    right, got = seen.expected[0]["losses"], seen.got[0]["losses"]
    return difference(right[:count], got[:count]) is None and difference(right[count], got[count]) is not None


EXERCISE = OnRanks(
    solution=train,
    cases=(Case(1, seed=1), Case(1, seed=2), Case(1, seed=5)),
    play=play,
    expected=expected,
    result=f"dtypes, losses and weights of {STEPS} steps",
    after="03-zero",
    place=10,
    start="First the masters: `[weight.detach().float() for weight in model.parameters()]`, and an optimizer "
    "for them. Then one "
    "step, phase by phase as in the list.",
    mistakes=(
        Mistake(
            "no-masters",
            (
                "Which tensors does your optimizer have, and in which dtype?",
                "It steps bf16 weights: an update smaller than 1/256 of a weight is rounded away, and the "
                "averages of Adam "
                "are in bf16 as well.",
                "Give it fp32 copies of the weights, and copy these back after each step.",
            ),
            [
                ("weight.detach().float() for weight", "weight for weight"),
                ("master.grad = weight.grad.float()", "pass"),
            ],
            when=lambda seen: dtype_of(seen, "optimizer"),
        ),
        Mistake(
            "an-fp32-model",
            (
                "In which dtype do the layers compute?",
                "`model.float()` makes all of it fp32: no memory and no time is saved. Only the masters are "
                "fp32; the model "
                "stays as it is, and its inputs become bf16.",
            ),
            [
                (
                    "    weights = list(model.parameters())\n",
                    "    model.float()\n    weights = list(model.parameters())\n",
                ),
                ("model(inputs.bfloat16())", "model(inputs)"),
            ],
            when=lambda seen: dtype_of(seen, "layers") or dtype_of(seen, "weights"),
        ),
        Mistake(
            "gradients-in-another-dtype",
            (
                "Which dtype has the gradient that you give to a master?",
                "A master is fp32, and so has to be its gradient: `weight.grad.float()`.",
            ),
            [("weight.grad.float()", "weight.grad")],
            when=lambda seen: re.search("assign.* grad", seen.error),
        ),
        Mistake(
            "inputs-in-another-dtype",
            (
                "The error names two dtypes. Which is that of the inputs, and which that of the weights?",
                "A matrix product needs one dtype for both. The batches are fp32: `inputs.bfloat16()`, or a region of "
                '`torch.autocast("cpu", torch.bfloat16)`, which does it in each layer.',
            ),
            [("model(inputs.bfloat16())", "model(inputs)")],
            when=lambda seen: "dtype" in seen.error,
        ),
        Mistake(
            "the-loss-in-bf16",
            (
                "In which dtype does the loss get the outputs?",
                "A mean over many numbers loses digits in bf16. The loss is out of the region: `outputs.float()`, and "
                "the targets as they are.",
            ),
            [("loss_fn(outputs.float(), targets)", "loss_fn(outputs, targets.bfloat16())")],
            when=lambda seen: dtype_of(seen, "loss"),
        ),
        Mistake(
            "never-copied-back",
            (
                "The first loss is right, and then it does not fall. With which weights does the model compute?",
                "The optimizer steps the masters; the model has weights of its own. Copy each master into its "
                "weight after the "
                "step.",
            ),
            [("                weight.copy_(master)\n", "                pass\n")],
        ),
        Mistake(
            "gradients-pile-up",
            (
                "Two losses are right, the third is not. What does the second backward add to?",
                "The optimizer's `zero_grad` clears the masters' gradients. Those of the model's weights are "
                "still there, and the next "
                "backward adds to them: `model.zero_grad()`.",
            ),
            [("model.zero_grad()", "optimizer.zero_grad()")],
        ),
        Mistake(
            "masters-made-anew",
            (
                "What does a master know that its bf16 weight does not?",
                "The digits that rounding takes away: small updates add up in it over many steps. A master that "
                "is copied from its weight "
                "in every step has lost them, and then there is no point in having it.",
            ),
            [
                (
                    "            master.grad = weight.grad.float()\n",
                    "            master.copy_(weight.detach())\n            master.grad = weight.grad.float()\n",
                )
            ],
        ),
    ),
    otherwise=(
        "Compare the losses one by one: if the first differs, look at the forward; if the second does, at step "
        "and copy.",
    ),
)
