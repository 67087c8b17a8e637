"""A dynamic loss scale by hand.

fp16 ends at 65504 above, and at 6e-8 below: many gradients are smaller, and become zero. So the loss is multiplied by a
large *scale* before the backward, and so is every gradient; before the step, the gradients are divided by it again. How
large may it be? As large as nothing overflows, and that changes during training. So it is found by trying:

- If a gradient is inf or nan after the backward, this step is *skipped*: the optimizer is not called, and the scale
  becomes
  scale × backoff.
- After `interval` steps *in a row* that were not skipped, the scale becomes scale × growth, and the count begins anew.

Write the class `LossScale`. `scaled(loss)` returns what `backward()` is called on. `step(optimizer)` is called after
the backward: it divides the gradients by the scale with which the backward was done, steps or skips, and then changes
the scale; it returns whether it stepped. `scale` is the current scale, a float. A parameter may have no gradient
(None).

Your results are compared with those of `torch.amp.GradScaler` in the same training. Use nothing from `torch.amp`: this
is what is inside.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2; NVIDIA's documentation of dynamic
scaling.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.course.framework.exercise import Case, Mistake
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen


# %% answer
class LossScale:
    """Multiplies the loss by a scale that is as large as the gradients allow."""

    def __init__(self, scale: float, growth: float, backoff: float, interval: int) -> None:
        ### BEGIN SOLUTION
        self.scale = scale
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.good_steps = 0  # in a row
        ### END SOLUTION

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        ### BEGIN SOLUTION
        return loss * self.scale
        ### END SOLUTION

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step with the loss's own gradients, if all are finite; change the scale; return whether it stepped."""
        ### BEGIN SOLUTION
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not all(torch.isfinite(p.grad).all() for p in parameters):
            self.scale *= self.backoff
            self.good_steps = 0
            return False
        for p in parameters:
            p.grad /= self.scale
        optimizer.step()
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.scale *= self.growth
            self.good_steps = 0
        return True
        ### END SOLUTION


# %% checks
STEPS, FEATURES, SAMPLES = 24, 6, 5
OVERFLOWS = {1: (5, 7, 16), 2: (0, 1, 2, 12, 15, 23), 3: (10,)}
"""By seed, the steps in which a gradient overflows, whatever the scale."""


class Model(nn.Module):
    """A linear model, and a parameter that nobody uses."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, generator=case.generator(7)))
        self.bias = nn.Parameter(torch.zeros(()))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, [samples]."""
        return x @ self.weight + self.bias


def training(case: Case, scaler: Any, step: Any, scale: Any) -> dict[str, Any]:
    """Train; return, for each step, whether it was made, the scale after it, and the weights."""
    model, generator = Model(case), case.generator()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, eps=0.05)
    made: dict[str, Any] = {"stepped": [], "scale": [], "weights": []}
    for number in range(STEPS):
        x, y = (
            torch.randn(SAMPLES, FEATURES, generator=generator),
            torch.randn(SAMPLES, generator=generator),
        )
        optimizer.zero_grad()
        scaler(nn.functional.mse_loss(model(x), y)).backward()
        if number in OVERFLOWS[case.seed]:
            bad = model.weight if number % 2 else model.bias  # one entry, or the last parameter
            bad.grad.view(-1)[-1] = math.nan if number % 3 == 1 else math.copysign(math.inf, number % 4 - 1)
        made["stepped"].append(step(optimizer))
        made["scale"].append(scale())
        made["weights"].append(torch.cat([model.weight.detach(), model.bias.detach().view(1)]))
    return made


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Train with the answer."""
    assert callable(answer)
    it = answer(2.0**10, case["growth"], case["backoff"], case["interval"])
    return training(case, it.scaled, it.step, lambda: it.scale)


def expected(case: Case) -> list[dict[str, Any]]:
    """Train with torch's own."""
    torchs = torch.amp.GradScaler("cpu", 2.0**10, case["growth"], case["backoff"], case["interval"])
    before = [0.0]

    def step(optimizer: torch.optim.Optimizer) -> bool:
        before[0] = torchs.get_scale()
        called: list[None] = []
        hook = optimizer.register_step_post_hook(lambda *_: called.append(None))
        torchs.step(optimizer)
        torchs.update()
        hook.remove()
        return bool(called)

    return [training(case, torchs.scale, step, torchs.get_scale)]


def stepped_too_often(seen: Seen) -> bool:
    """Return whether a step was made that should have been skipped."""
    assert seen.got is not None
    pairs = zip(seen.got[0]["stepped"], seen.expected[0]["stepped"], strict=True)
    return any(stepped and not right for stepped, right in pairs)


EXERCISE = OnRanks(
    solution=LossScale,
    cases=(
        Case(1, 3, {"growth": 2.0, "backoff": 0.5, "interval": 4}),
        Case(1, 1, {"growth": 2.0, "backoff": 0.5, "interval": 3}),
        Case(1, 2, {"growth": 1.5, "backoff": 0.25, "interval": 2}),
    ),
    play=play,
    expected=expected,
    result=f"steps, scales and weights of {STEPS} steps",
    after="03-zero",
    place=20,
    start="`__init__` keeps the four numbers, and a count of good steps. `scaled` is one line. In `step`, first "
    "find out whether "
    "all gradients are finite: `torch.isfinite(p.grad).all()`.",
    mistakes=(
        Mistake(
            "none-is-no-gradient",
            (
                "An operation was asked of None. Has every parameter a gradient?",
                "A parameter that the loss does not depend on has `grad` None. Leave it out.",
            ),
            [(" if p.grad is not None]", "]")],
            when=lambda seen: "NoneType" in seen.error,
        ),
        Mistake(
            "steps-with-scaled-gradients",
            (
                "The first step is wrong already. Whose gradients does the optimizer see?",
                "Those of the loss times the scale. Divide them before the step.",
            ),
            [("            p.grad /= self.scale\n", "            pass\n")],
        ),
        Mistake(
            "sees-inf-but-not-nan",
            (
                "What is inf - inf, and is it inf?",
                "It is nan, and `isinf` does not find it. `torch.isfinite` is False for both.",
            ),
            [("not all(torch.isfinite(p.grad).all()", "any(torch.isinf(p.grad).any()")],
            when=lambda seen: stepped_too_often(seen),
        ),
        Mistake(
            "steps-anyway",
            (
                "After an overflow, what is in the weights?",
                "A gradient that is inf or nan makes the weight nan for ever. Halve the scale, *and* leave the "
                "step out.",
            ),
            [
                (
                    "            self.good_steps = 0\n            return False\n",
                    "            self.good_steps = 0\n            optimizer.step()\n            return False\n",
                )
            ],
            when=lambda seen: (
                seen.got and not all(bool(torch.isfinite(each).all()) for each in seen.got[0]["weights"])
            ),
        ),
        Mistake(
            "keeps-the-scale-after-an-overflow",
            (
                "A step is skipped. With which scale is the next one tried?",
                "With the same scale it will overflow again: multiply it by `backoff`.",
            ),
            [("            self.scale *= self.backoff\n", "")],
        ),
        Mistake(
            "never-grows",
            (
                "After `interval` good steps, what should the scale be?",
                "A scale that only falls ends at 0. After `interval` steps in a row without overflow, multiply "
                "it by `growth`.",
            ),
            [("            self.scale *= self.growth\n", "")],
        ),
        Mistake(
            "grows-in-every-step",
            (
                "How many steps does the scale stay as it is?",
                "It grows once in `interval` steps. Count them, and begin anew when it has grown.",
            ),
            [("self.good_steps == self.interval", "self.good_steps")],
        ),
        Mistake(
            "grows-and-grows",
            (
                "After it has grown once, how long does it take until it grows again?",
                "`interval` steps again: the count begins anew at 0.",
            ),
            [
                ("self.good_steps == self.interval", "self.good_steps >= self.interval"),
                (
                    "            self.scale *= self.growth\n            self.good_steps = 0\n",
                    "            self.scale *= self.growth\n",
                ),
            ],
        ),
        Mistake(
            "not-in-a-row",
            (
                "How many steps in a row were good when your scale grows?",
                "An overflow sets the count back to 0: only steps without one in between count.",
            ),
            [("            self.good_steps = 0\n            return False", "            return False")],
        ),
        Mistake(
            "skipped-steps-count",
            (
                "After an overflow, when does your scale grow, and when should it?",
                "A skipped step is no good step. The count begins at 0 after it, not at 1.",
            ),
            [
                (
                    "            self.good_steps = 0\n            return False",
                    "            self.good_steps = 1\n            return False",
                )
            ],
        ),
        Mistake(
            "divides-by-the-next-scale",
            (
                "With which scale was the backward done, when the scale grows in this step?",
                "With the one before. First divide and step; then change the scale.",
            ),
            [
                (
                    "            p.grad /= self.scale\n        optimizer.step()\n        self.good_steps",
                    "            pass\n        self.good_steps",
                ),
                (
                    "        return True\n",
                    "        for p in parameters:\n            p.grad /= self.scale\n"
                    "        optimizer.step()\n        return True\n",
                ),
            ],
        ),
    ),
    otherwise=(
        "Print the scale after each step, with `interval` 2 and no overflow: 1024, 2048, 2048, 4096, ...",
    ),
)
