"""One step of serial training that can be repeated: as it is, with other roundings, or for a part of the batch."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.common.exceptions import one_line
from mpkit.strategies.data.microbatch import Value, leaves, part
from mpkit.strategies.experts.known_experts import find_balanced
from mpkit.strategies.models.heard_draws import CannotReplay, GivenDraws
from mpkit.strategies.packing.packing import dumps
from mpkit.strategies.proof.draws import SharedDraws, StepDraws
from mpkit.strategies.proof.rounding import SPREADS, RoundingMode, coarsest, distance, largest
from mpkit.strategies.reference.serial import Serial

__all__ = ["Attempt", "Found", "Noise", "run_user_code"]

Found = tuple[Tensor, dict[str, Tensor | None]]
"""The loss, and the gradients by name."""

SHADOWS = 4.0
"""How many times as far as a step in 16 bits is from the same in 32 bits two results in 16 bits may be apart: kernels
sum up in 16 bits inside, as long as the batch is, which nobody can perturb from outside."""

REPETITIONS = 3
"""How often a step is repeated to find out what rounding does to it."""

CEILING = 3.0
"""How many square roots of a rounding repetitions may be apart: 1e-3 in float32, 4e-8 in float64."""

SMALL = 0.03
"""The share of the largest gradient below which a gradient may be nothing but rounding."""


@dataclass
class Attempt:
    """One step of serial training.

    Model and loss are copied together, so that a loss that refers to the model sees the copy's, and as they travel to
    the ranks. What cannot be copied can be computed once, and not again.

    Attributes:
        serial: the training, at the beginning of the step.
        batch: inputs and targets.
        draws: the random numbers of the step.
        scale: the loss scale.
        start: model and loss at the beginning, pickled; or why they cannot be.
    """

    serial: Serial
    batch: tuple[Value, Value]
    draws: StepDraws
    scale: float
    start: bytes | CannotReplay = b""

    def __post_init__(self) -> None:
        if self.start:
            return
        try:
            with run_user_code("copying model and loss"):
                self.start = dumps((self.serial.model, self.serial.loss))
        except CannotReplay as error:
            self.start = error

    def begin_again(self) -> Serial:
        """Return the training at the beginning of the step once more, to be changed at will.

        Raises:
            CannotReplay: model and loss cannot be copied.
        """
        if isinstance(self.start, CannotReplay):
            raise self.start
        serial = copy.copy(self.serial)
        with run_user_code("copying model and loss"):
            serial.model, serial.loss = pickle.loads(self.start)
            for module in serial.model.modules():
                if isinstance(module, nn.RNNBase):
                    module.flatten_parameters()  # for cuDNN
        return serial

    def use_draws(self) -> AbstractContextManager[Any]:
        """Return a context in which the ranks' draws are used, from the first one on."""
        self.draws.begin()
        return GivenDraws(self.draws.give)

    def run(
        self, serial: Serial, batch: tuple[Value, Value] | None = None, draws: StepDraws | None = None
    ) -> Found:
        """Return loss and gradients of the whole batch at once, or of a part of it with its own draws.

        Where a layer draws a number for all samples of a forward, it is that of the parts that the ranks drew for.
        """
        if batch is not None and draws is not None:
            return self._run(serial, batch, draws)
        try:
            return self._run(serial, self.batch, self.draws)
        except CannotReplay:
            if not self.draws:
                raise
            return self._in_parts(serial)

    def repeat_rounded(self, seed: int | None) -> Found:
        """Return the same again, and the buffers afterwards by "buffer NAME"; with a seed, with other roundings.

        The loss has another scale then: the backwards of some operators, such as matrix_exp, stop where that says.
        """
        serial = self.begin_again()
        attempt = self if seed is None else replace(self, scale=self.scale / (2 + seed))
        with nullcontext() if seed is None else RoundingMode(seed):
            loss, found = attempt.run(serial)
        buffers = {f"buffer {name}": buffer for name, buffer in serial.model.named_buffers()}
        return loss, {**found, **buffers}

    def overflows(self) -> bool:
        """Return whether a gradient of the whole batch, or of a part of it, is not finite at twice the loss scale."""
        twice = replace(self, scale=2 * self.scale)
        parts = (
            (tuple(part(value, which) for value in self.batch), draws)
            for which, _, draws in self.draws.parts()
        )
        found = [twice.run(self.begin_again())[1]]
        found += [twice.run(self.begin_again(), (x, y), draws)[1] for (x, y), draws in parts]
        return any(g is not None and not bool(g.isfinite().all()) for each in found for g in each.values())

    def buffers_in_parts(self, replica: int) -> dict[str, Tensor]:
        """Return the model's buffers after a replica's shares of the micro-batches, one after another."""
        serial = self.begin_again()
        for number, (which, _, draws) in enumerate(self.draws.parts()):
            if number % self.draws.plan.dp == replica:
                inputs, targets = (part(value, which) for value in self.batch)
                self._run(serial, (inputs, targets), draws)
        return dict(serial.model.named_buffers())

    def in_32_bits(self) -> dict[str, Tensor]:
        """Return the gradients of a model that computes in 16 bits, in 32; none for any other, or where it cannot."""
        serial = self.begin_again()
        if coarsest(serial.model) not in (torch.float16, torch.bfloat16):
            return {}
        serial.model, serial.dtype = serial.model.float(), torch.float32
        try:
            _, found = self.run(serial)
        except RuntimeError:  # it casts tensors by itself
            return {}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def _in_parts(self, serial: Serial) -> Found:
        """Return the weighted sum over the replicas' shares of the micro-batches."""
        loss, total = torch.zeros(()), dict[str, Tensor | None].fromkeys(serial.weights)
        for which, weight, draws in self.draws.parts():
            inputs, targets = (part(value, which) for value in self.batch)
            value, gradients = self._run(serial, (inputs, targets), draws)
            loss = loss + value * weight
            for name, gradient in gradients.items():
                if gradient is not None:
                    before = total[name]
                    share = gradient * weight
                    total[name] = share if before is None else before + share
        return loss, total

    def _run(self, serial: Serial, batch: tuple[Value, Value], draws: StepDraws) -> Found:
        draws.begin()
        for layer in find_balanced(serial.model).values():  # which add gradients to those of the loss
            layer.batch.loss_scale = self.scale
        with run_user_code("the step"), GivenDraws(draws.give):
            return serial.gradients(*batch, scale=self.scale)


@contextmanager
def run_user_code(what: str) -> Iterator[None]:
    """Run code of the user's, which may raise anything; an error that is raised in this package is mpkit's own.

    Raises:
        CannotReplay: the user's code raises, or an operator that it calls.
    """
    try:
        yield
    except (CannotReplay, SharedDraws):
        raise
    except Exception as error:
        where = traceback.walk_tb(error.__traceback__)
        if [frame.f_globals.get("__name__", "") for frame, _ in where][-1].startswith(
            ("mpkit.strategies.proof.", "mpkit.strategies.wrappers.")
        ):
            raise
        raise CannotReplay(f"{what} fails in plain PyTorch: {one_line(error)}") from error


class Noise:
    """What rounding does to the loss and the gradients of one step.

    Args:
        attempt: the step.

    Attributes:
        ceiling: the largest difference that rounding explains, relative to what is compared: about 1e-3 in float32.
        repeats_differ: whether repetitions differ by more, and as much as what was compared.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt, self.repeats_differ = attempt, False
        self._spread: dict[str, float] = {}
        self._scales: dict[str, float] = {}
        tensors = [leaf for value in attempt.batch for leaf in leaves(value)]
        self.ceiling = CEILING * float(torch.finfo(coarsest(attempt.serial.model, tensors)).eps) ** 0.5

    def explains(self, by: float, name: str) -> bool:
        """Return whether rounding explains a difference of a gradient, a buffer ("buffer NAME") or the loss ("").

        Raises:
            CannotReplay: repetitions differ as much, by more than rounding explains; or they fail.
        """
        if not self._spread:
            self._spread = self._spreads()
        bound, scale = self._spread[name], self._scales[name]
        if self.ceiling * scale < by <= bound:
            self.repeats_differ = True
            what = name if name.startswith("buffer") else f"the gradient of {name}" if name else "the loss"
            raise CannotReplay(
                f"repeats of the step differ by {bound / SPREADS / scale if scale else inf:.0e} in {what}, so "
                "something in it is not the same each time: random numbers that mpkit does not hear (os.urandom, a "
                "generator of another library), the clock, or what a module keeps outside of itself"
            )
        return by <= bound

    def _spreads(self) -> dict[str, float]:
        loss, base = self._attempt.repeat_rounded(None)
        spread = dict.fromkeys(("", *base), 0.0)
        for seed in range(REPETITIONS):
            value, gradients = self._attempt.repeat_rounded(seed)
            spread[""] = max(spread[""], distance(value, loss))
            for name, gradient in gradients.items():
                known = base[name]
                if gradient is not None and known is not None and gradient.shape == known.shape:
                    spread[name] = max(spread[name], distance(gradient, known))
        found = {name: SPREADS * by for name, by in spread.items()}
        for name, wide in self._attempt.in_32_bits().items():
            known = base[name]
            found[name] += 0.0 if known is None else SHADOWS * distance(known, wide)
        # A gradient that is zero but for rounding has that of the others.
        sizes = {name: largest(value) for name, value in base.items() if value is not None}
        most = max((size for name, size in sizes.items() if not name.startswith("buffer ")), default=0.0)
        least = {name: 0.0 if name.startswith("buffer ") else SMALL * most for name in found}
        self._scales = {name: max(sizes.get(name, 0.0), least[name]) for name in found} | {"": largest(loss)}
        return found
