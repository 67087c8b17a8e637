"""What a forward keeps for its backward, in the order in which F, recomputation, I and W fill it and empty it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpkit.strategies.data.microbatch import Value, leaves
from mpkit.strategies.stage.recompute import RecomputedCall
from mpkit.strategies.stage.split_backward import WeightGrads

__all__ = ["KeptForward"]


@dataclass
class KeptForward:
    """What the forward of one micro-batch keeps.

    Attributes:
        inputs: the stage's inputs, which are leaves.
        outputs: the stage's outputs; of a stage that is recomputed as a whole, the edges of its graph.
        call: the call of a stage that is recomputed as a whole.
        weight_grads: what I leaves for W.
    """

    inputs: Value
    outputs: tuple[Any, ...] = ()
    call: RecomputedCall | None = None
    weight_grads: WeightGrads | None = None

    @property
    def differentiable(self) -> list[Tensor]:
        """The inputs that require a gradient."""
        return [tensor for tensor in leaves(self.inputs) if tensor.requires_grad]

    def roots(
        self, gradients: dict[int, Tensor] | None, loss_scale: float
    ) -> tuple[list[Any], tuple[Tensor, ...]]:
        """Return the outputs from which the backward starts, and their gradients.

        Args:
            gradients: gradients of the outputs, by the output's number; None if the outputs are a share of the loss.
            loss_scale: gradient of the loss.
        """
        if gradients is None:
            losses = [loss for loss in self.outputs if loss.requires_grad]
            return losses, tuple(torch.full_like(loss, loss_scale) for loss in losses)
        return [self.outputs[i] for i in gradients], tuple(gradients.values())
