"""One step of serial training that can be repeated: as it is, with other roundings, or for a part of the batch."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpkit.strategies.data.microbatch import Value, leaves, part
from mpkit.strategies.experts.divide import find_balanced
from mpkit.strategies.models.heard_draws import CannotReplay, GivenDraws
from mpkit.strategies.packing.packing import dumps
from mpkit.strategies.proof.compare import Noise, Results, run_user_code
from mpkit.strategies.proof.draws import StepDraws
from mpkit.strategies.proof.rounding import coarsest, rounded
from mpkit.strategies.reference.serial import Serial

Found = tuple[Tensor, dict[str, Tensor | None]]  # the loss, and the gradients by name

ALL = slice(None)


class PartOfStep(NamedTuple):
    """A replica's share of a micro-batch: its samples, their weight and draws, and serial training's results for it."""

    which: slice
    weight: float
    draws: StepDraws
    found: Found


@dataclass
class Attempt:
    """One step of serial training.

    Model and loss are copied together, as they travel to the ranks, so that a loss that refers to the model sees the
    copy's. What cannot be copied can be computed once, and not again.
    """

    serial: Serial
    batch: tuple[Value, Value]
    draws: StepDraws
    scale: float
    start: bytes | CannotReplay = b""  # model and loss at the beginning, pickled; or why they cannot be

    def __post_init__(self) -> None:
        if self.start:
            return
        try:
            with run_user_code("copying model and loss"):
                self.start = dumps((self.serial.model, self.serial.loss))
        except CannotReplay as error:
            self.start = error

    def begin_again(self) -> Serial:
        """Return the training at the beginning of the step once more, to be changed at will."""
        if isinstance(self.start, CannotReplay):
            raise self.start
        serial = copy.copy(self.serial)
        with run_user_code("copying model and loss"):
            serial.model, serial.loss = pickle.loads(self.start)
            for module in serial.model.modules():
                if isinstance(module, nn.RNNBase):
                    module.flatten_parameters()  # for cuDNN
        return serial

    def samples(self, which: slice) -> tuple[Value, Value]:
        """Return some samples of the batch."""
        inputs, targets = (part(value, which) for value in self.batch)
        return inputs, targets

    def use_draws(self) -> AbstractContextManager[Any]:
        """Return a context in which the ranks' draws are used, from the first one on."""
        self.draws.begin()
        return GivenDraws(self.draws.give)

    def run(self, serial: Serial) -> Found:
        """Return loss and gradients of the whole batch at once.

        A layer may draw one number for all samples of a forward; then the parts that the ranks drew for are added up.
        """
        try:
            return self._run(serial, ALL, self.draws)
        except CannotReplay:
            if not self.draws:
                raise
        loss, total = torch.zeros(()), dict[str, Tensor | None].fromkeys(serial.weights)
        for which, weight, draws in self.draws.parts():
            value, gradients = self._run(serial, which, draws)
            loss = loss + value * weight
            for name, gradient in gradients.items():
                if gradient is not None:
                    before, share = total[name], gradient * weight
                    total[name] = share if before is None else before + share
        return loss, total

    def _run(self, serial: Serial, which: slice, draws: StepDraws) -> Found:
        draws.begin()
        for layer in find_balanced(serial.model).values():  # which add gradients to those of the loss
            layer.batch.loss_scale = self.scale
        with run_user_code("the step"), GivenDraws(draws.give):
            return serial.gradients(*self.samples(which), scale=self.scale)

    # ---- again

    @cached_property
    def whole(self) -> Found:
        """The same again: loss and gradients of the whole batch."""
        return self.run(self.begin_again())

    def parts(self) -> Iterator[PartOfStep]:
        """Yield each part of the plan by itself, without those that have no samples of their own."""
        for which, weight, draws in self.draws.parts():
            if weight:
                found = self._run(self.begin_again(), which, draws)
                yield PartOfStep(which, weight, draws, found)

    def repeat(self, seed: int | None) -> Results:
        """Return the same again, and the buffers afterwards; with a seed, with other roundings.

        The loss then has another scale: it decides where the backwards of some operators, such as matrix_exp, stop.
        """
        serial = self.begin_again()
        attempt = self if seed is None else replace(self, scale=self.scale / (2 + seed))
        with rounded(seed):
            loss, found = attempt.run(serial)
        return {"": loss, **found} | {f"buffer {name}": b for name, b in serial.model.named_buffers()}

    def noise(self) -> Noise:
        """Return what rounding does to the loss, the gradients and the buffers of the step."""
        tensors = [leaf for value in self.batch for leaf in leaves(value)]
        return Noise(self.repeat, coarsest(self.serial.model, tensors), self.in_32_bits)

    def overflows(self) -> bool:
        """Return whether a gradient of the batch, or of a part of it, is not finite at twice the loss scale."""
        twice = replace(self, scale=2 * self.scale)
        found = [twice.run(twice.begin_again())[1], *(each.found[1] for each in twice.parts())]
        return any(g is not None and not bool(g.isfinite().all()) for each in found for g in each.values())

    def buffers_in_parts(self, replica: int) -> dict[str, Tensor]:
        """Return the model's buffers after a replica's shares of the micro-batches, one after another."""
        serial = self.begin_again()
        for which, _, draws in self.draws.parts()[replica :: self.draws.plan.dp]:
            self._run(serial, which, draws)
        return dict(serial.model.named_buffers())

    def in_32_bits(self) -> dict[str, Tensor]:
        """Return in 32 bits the gradients of a model that computes in 16; nothing for any other, or if it cannot."""
        serial = self.begin_again()
        if coarsest(serial.model) not in (torch.float16, torch.bfloat16):
            return {}
        serial.model, serial.dtype = serial.model.float(), torch.float32
        try:
            _, found = self.run(serial)
        except RuntimeError:  # it casts tensors by itself
            return {}
        return {name: gradient for name, gradient in found.items() if gradient is not None}
