"""The exponential moving average of the weights (EMA), kept as one more state of the optimizer.

    average <- decay * average + (1 - decay) * weight        after each step; after the first one, average = weight

which is what torch.optim.swa_utils.AveragedModel computes with `get_ema_multi_avg_fn(decay)`. As a state of the
optimizer, it is divided like the weights: every rank averages the pieces that it updates, in fp32 where the optimizer
works on fp32 copies, and checkpoints save it and divide it anew. Buffers are not averaged.

Source: Polyak and Juditsky 1992; with exponential weights, Tarvainen and Valpola, "Mean teachers", 2017, section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from mpkit.strategies.update.optimizer import OptimizerFunction, describe_optimizer

__all__ = ["KEY", "Average", "with_average"]

KEY = "ema"
"""The name of the average among an optimizer's states."""


class Average:
    """A hook after an optimizer's step."""

    def __init__(self, decay: float) -> None:
        self._decay = decay

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, _args: Any = None, _kwargs: Any = None) -> None:
        """Update the averages of all that the optimizer updates."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None and KEY not in optimizer.state.get(parameter, {}):
                    continue  # it has not changed, and some optimizers take any state for all of theirs
                state = optimizer.state[parameter]
                if KEY in state:
                    state[KEY].lerp_(parameter, 1.0 - self._decay)
                else:
                    state[KEY] = parameter.detach().clone()


def with_average(function: Callable[[Any], Any], decay: float) -> OptimizerFunction:
    """Return a function that makes the same optimizer, which also averages the weights."""
    made = describe_optimizer(function)

    def make(parameters: Any) -> Any:
        optimizer = made(parameters)
        if isinstance(optimizer, Optimizer):
            optimizer.register_step_post_hook(Average(decay))
        return optimizer

    return replace(made, function=make)
