"""Trials: run model and loss for real on a few samples, all at once and in parts as in the plan.

Each trial uses a copy of the model with its own buffers and attributes and shared weights. Random draws do not depend
on the batch (`draws`). BatchNorm uses its running statistics: that it depends on the batch is known and handled.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpkit.strategies.data.microbatch import Value, map_tensors
from mpkit.strategies.data_parallel.sync_batchnorm import batch_norms
from mpkit.strategies.experts.known_experts import find_balanced
from mpkit.strategies.loss.quotient import as_pair
from mpkit.strategies.models.chain import layers_of
from mpkit.strategies.prepare.dry_run.copies import copy_model
from mpkit.strategies.prepare.probe.draws import SameDraws
from mpkit.strategies.stage.stage import call

__all__ = ["ProbeResult", "ProbeTrial", "rows_of"]

Samples = Sequence[int]


@dataclass
class ProbeResult:
    """The result for a batch, in one part or several.

    Attributes:
        loss: the loss of the batch, combined from the parts.
        losses: the loss of each part by itself.
        gradients: the combined gradients of the parameters, by name; empty if not requested.
        outputs: the outputs of the model, by part.
        buffers: the buffers of the model after the first part, by name.
        count: the count that the loss returned; None for a mean.
    """

    loss: float = 0.0
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    count: float | None = None

    def add_up(self, values: list[Any], weights: list[float]) -> Tensor:
        """Return the loss of the batch, combined from what the loss returned for each part."""
        pairs = [as_pair(value) for value in values]
        totals = [
            value.reshape(()) * weight if pair is None else pair[0]
            for value, weight, pair in zip(values, weights, pairs, strict=True)
        ]
        loss = sum(totals[1:], totals[0])
        self.losses = [
            float(value if pair is None else pair[0] / pair[1])
            for value, pair in zip(values, pairs, strict=True)
        ]
        counts = [float(pair[1]) for pair in pairs if pair is not None]
        if counts:
            self.count = sum(counts)
            loss = loss / loss.new_tensor(self.count)
        self.loss = float(loss)
        return loss


class ProbeTrial:
    """A model and a loss that can be tried.

    Args:
        model: the model; it is not changed.
        loss: the loss; if it has state, pass a copy.
        data: inputs and targets.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Any], data: tuple[Value, Value]) -> None:
        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            memo[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        self.model = copy_model(model, memo)
        self.loss, self.data = loss, data
        self.still = False  # whether draws must be replaced by constants
        self.seed = 0  # of Python's and NumPy's random numbers, for each part

    def wide(self) -> ProbeTrial:
        """Return this trial in float64."""
        made = copy.copy(self)
        made.model = copy_model(self.model).double()
        made.data = _wide(self.data[0]), _wide(self.data[1])
        if isinstance(self.loss, nn.Module):
            made.loss = copy.deepcopy(self.loss).double()
        return made

    def without_randomness(self) -> ProbeTrial:
        """Return this trial without randomness."""
        made = copy.copy(self)
        made.still = True
        return made

    def with_loss(self, loss: Callable[[Any, Any], Any]) -> ProbeTrial:
        """Return this trial with another loss."""
        made = copy.copy(self)
        made.loss = loss
        return made

    def with_evaluation(self) -> ProbeTrial:
        """Return this trial with the model in evaluation mode."""
        made = copy.copy(self)
        made.model = copy_model(self.model).eval()
        return made

    def repeats(self, parts: Sequence[Samples]) -> bool:
        """Return whether the loss is the same for different seeds of Python's and NumPy's random numbers."""
        other = copy.copy(self)
        other.seed = 1
        return self.run(parts).loss == other.run(parts).loss

    def with_data(self, data: tuple[Value, Value]) -> ProbeTrial:
        """Return this trial with other data."""
        made = copy.copy(self)
        made.data = data
        return made

    def run(
        self,
        parts: Sequence[Samples],
        *,
        gradients: bool = False,
        calls: int = 1,
        watch: Callable[[nn.Module], Any] | None = None,
    ) -> ProbeResult:
        """Run these parts, which together are the batch; if there was randomness, run them again without it.

        Args:
            parts: the numbers of each part's samples.
            gradients: whether to compute gradients.
            calls: how often to call the model for each part; the last call counts.
            watch: called with each part's copy of the model before the forward.
        """
        if not self.still:
            state = torch.get_rng_state()
            result = self._run(parts, gradients, calls, watch)
            if torch.equal(state, torch.get_rng_state()):
                return result
            self.still = True
        with SameDraws():  # type: ignore[no-untyped-call]
            return self._run(parts, gradients, calls, watch)

    def of_outputs(self, outputs: list[Any], parts: Sequence[Samples]) -> ProbeResult:
        """Return the result of the loss for these parts, given the model's outputs."""
        result, samples = ProbeResult(), sum(map(len, parts))
        with torch.no_grad(), SameDraws():  # type: ignore[no-untyped-call]
            values = [
                self.loss(made, rows_of(self.data[1], part))
                for made, part in zip(outputs, parts, strict=True)
            ]
            result.add_up(values, [len(part) / samples for part in parts])
        return result

    def _run(
        self,
        parts: Sequence[Samples],
        gradients: bool,
        calls: int,
        watch: Callable[[nn.Module], Any] | None,
    ) -> ProbeResult:
        """Run forward and loss, and the backward if gradients are requested."""
        result, samples = ProbeResult(), sum(map(len, parts))
        values: list[Any] = []
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        with torch.set_grad_enabled(gradients), _eager():
            for i, part in enumerate(parts):
                inputs, targets = (rows_of(value, part) for value in self.data)
                model = self._copy()
                random.seed(self.seed)
                np.random.seed(self.seed)
                layers = [
                    layer for _, layer in layers_of(model)
                ]  # the first one takes the inputs, as on a rank
                if watch is not None:
                    watch(model)
                made: Any = None
                for _ in range(calls):
                    made = inputs
                    for number, layer in enumerate(layers):
                        made = call(layer, made, first=number == 0)
                if i == 0:
                    result.buffers = {n: b.detach() for n, b in model.named_buffers()}
                values.append(self.loss(made, targets))
                result.outputs.append(made)
            loss = result.add_up(values, [len(part) / samples for part in parts])
            if gradients and loss.requires_grad:
                of_each: tuple[Tensor | None, ...] = torch.autograd.grad(
                    loss, list(named.values()), allow_unused=True
                )
                result.gradients = {n: g for n, g in zip(named, of_each, strict=True) if g is not None}
        return result

    def _copy(self) -> nn.Module:
        model = copy.deepcopy(self.model, {id(p): p for p in self.model.parameters()})
        for norm in batch_norms(model).values():
            if norm.running_mean is None:
                norm.forward = _same  # type: ignore[method-assign]
            norm.eval()
        for layer in find_balanced(
            model
        ).values():  # whose routing depends on the batch, as is known and handled
            layer.training = False
        return model


def _same(input: Tensor) -> Tensor:
    return input


def rows_of(value: Value, samples: Samples) -> Value:
    """Return some samples of a value."""
    index = torch.tensor(list(samples))
    return map_tensors(lambda tensor: tensor[index], value)


def _wide(value: Value) -> Value:
    return map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, value)


@contextmanager
def _eager() -> Iterator[None]:
    """Disable compilation inside the context."""
    with torch.compiler.set_stance("force_eager"):
        yield
