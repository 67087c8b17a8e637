"""Serial training: what one device makes of the whole batches, to compare an answer with.

Everything is made from a case's seed, in float64, so it is the same in every process.

    model            linear layers with tanh between them
    batches          whole batches, one a step; `share`: those of a rank
    train            on one device
    beside_serial    step by step: serial training's losses and weights, and those of an answer
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from mpkit.classroom.exercise import Case

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Batch",
    "BesideSerial",
    "Outcome",
    "batches",
    "beside_serial",
    "fill",
    "gradients",
    "model",
    "mse",
    "outcome",
    "sgd",
    "share",
    "train",
    "weights",
]

M = TypeVar("M", bound=nn.Module)

Batch = tuple[Tensor, Tensor]
"""Inputs (samples, 6) and targets (samples, 3)."""

Outcome = dict[str, Any]
"""What training is compared by: "losses", one a step, and "weights", by name."""

WIDTHS = (6, 8, 8, 3)


def model(seed: int, widths: Sequence[int] = WIDTHS) -> nn.Sequential:
    """Linear layers with tanh between them.

    >>> [name for name, _ in model(1).named_parameters()]
    ['0.weight', '0.bias', '2.weight', '2.bias', '4.weight', '4.bias']
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return fill(nn.Sequential(*layers[:-1]), seed)


def fill(module: M, seed: int) -> M:
    """Give every parameter values drawn from a seed; in float64."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.double().parameters():
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(draw / parameter.shape[-1] ** 0.5)
    return module


def batches(case: Case, samples: int, steps: int) -> list[Batch]:
    """So many whole batches, of a function that the model can learn."""
    generator = case.generator()
    truth = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    found = []
    for _ in range(steps):
        x = torch.randn(samples, 6, generator=generator, dtype=torch.float64) + 0.3
        found.append((x, torch.tanh(x @ truth)))
    return found


def share(batch: Batch, rank: int, ranks: int) -> Batch:
    """Every n-th sample of a batch, as the kit deals them."""
    x, y = batch
    return x[rank::ranks], y[rank::ranks]


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean squared error: a mean over the samples."""
    return nn.functional.mse_loss(outputs, targets)


def sgd(module: nn.Module) -> torch.optim.SGD:
    """With momentum and weight decay: what is right for plain SGD only, or at the first step, goes wrong here."""
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Its parameters as they are now, by name."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Its gradients as they are now, by name."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def outcome(losses: Any, module: nn.Module) -> Outcome:
    """Of an answer: what it returned, and the weights that it leaves behind."""
    return {"losses": losses, "weights": weights(module)}


def train(
    module: nn.Module,
    data: Sequence[Batch],
    loss: Callable[[Tensor, Tensor], Tensor] = mse,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> Outcome:
    """Training on one device, a step a batch; `module` is left as it is."""
    module = copy.deepcopy(module)
    optimize = optimizer(module)
    losses = []
    for x, y in data:
        optimize.zero_grad()
        value = loss(module(x), y)
        torch.autograd.backward(value)
        optimize.step()
        losses.append(value.item())
    return outcome(losses, module)


# ---- looking for a bug ------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class BesideSerial:
    """Prints and shows itself as a table, none of it cut off.

    Attributes:
        frame: the table.
    """

    frame: pd.DataFrame

    def __str__(self) -> str:
        return str(self.frame.to_string())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        import pandas as pd

        with pd.option_context("display.max_colwidth", None):
            return str(self.frame.to_html())


def beside_serial(name: str, answer: Any) -> BesideSerial:
    """A row a step: serial training's loss, the answer's on each rank, and the weights that are no longer equal.

    Of these also how far they have moved since the beginning, as a multiple of how far they should have.
    The inputs are not those of the check.

    Args:
        name: of the exercise; its results are `Outcome`s, and its cases have the size "steps".
        answer: what it is about.
    """
    import pandas as pd

    from mpkit.classroom.catalogue import find
    from mpkit.classroom.on_ranks import OnRanks
    from mpkit.classroom.room import Answer, shared_room

    exercise = find(name).exercise
    assert isinstance(exercise, OnRanks)
    case = replace(exercise.cases[0], seed=0)
    rows = []
    for step in range(case["steps"]):
        seen = shared_room().play(exercise.play, Answer.of(answer), _until(case, step + 1))
        if seen.got is None:
            raise RuntimeError(seen.hang or f"{seen.error} ({seen.where})")
        begin = exercise.expected(_until(case, 0))
        rows.append(_Row(step, begin, exercise.expected(seen.case), seen.got).cells())
    return BesideSerial(pd.DataFrame(rows).set_index("step"))


def _until(case: Case, steps: int) -> Case:
    return replace(case, sizes={**case.sizes, "steps": steps})


@dataclass(frozen=True)
class _Row:
    """Training up to a step; outcomes by rank."""

    step: int
    begin: Sequence[Outcome]
    expected: Sequence[Outcome]
    got: Sequence[Outcome]

    def cells(self) -> dict[str, Any]:
        """By column."""
        losses = {f"loss, rank {r}": _number(one["losses"][-1]) for r, one in enumerate(self.got)}
        apart = self._apart()
        return {
            "step": self.step,
            "loss, serial": _number(self.expected[0]["losses"][-1]),
            **losses,
            "weights that differ after it, by": ", ".join(
                f"{name} {off:.0e}" for name, (off, _) in apart.items()
            )
            or "none",
            "they moved, × serial's": ", ".join(f"{moved:.2f}" for _, moved in apart.values()),
        }

    def _apart(self) -> dict[str, tuple[float, float]]:
        """By name how far off a weight is, where it is most, and how far it came, out of how far it should have."""
        found: dict[str, tuple[float, float]] = {}
        for begin, right, mine in zip(self.begin, self.expected, self.got, strict=True):
            for name, tensor in right["weights"].items():
                start, now = begin["weights"][name], mine["weights"][name]
                off = float((tensor - now).abs().max())
                if not off < 1e-6 and off > found.get(name, (0.0, 0.0))[0]:
                    found[name] = off, float((now - start).norm() / (tensor - start).norm())
        return found


def _number(value: Any) -> str:
    return f"{float(value):.5f}"
