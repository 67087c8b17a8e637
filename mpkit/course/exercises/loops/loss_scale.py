"""A dynamic loss scale by hand."""

import math

from mpkit.course.author import *


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

LARGE = 20
"""The step in which a gradient is large and finite; its square is not."""


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
    groups = [{"params": [model.weight, model.unused]}, {"params": [model.bias], "lr": 0.02}]
    optimizer = torch.optim.Adam(groups, lr=0.05, eps=0.05)
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
        elif number == LARGE:
            model.weight.grad.view(-1)[0] = 1e21
        made["stepped"].append(step(optimizer))
        made["scale"].append(scale())
        made["weights"].append(torch.cat([model.weight.detach(), model.bias.detach().view(1)]))
    return made


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Train with the answer."""
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


EXERCISE = OnRanks(
    cases=(
        Case(1, 3, {"growth": 2.0, "backoff": 0.5, "interval": 4}),
        Case(1, 1, {"growth": 2.0, "backoff": 0.5, "interval": 3}),
        Case(1, 2, {"growth": 1.5, "backoff": 0.25, "interval": 2}),
    )
)
