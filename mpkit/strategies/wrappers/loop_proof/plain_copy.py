"""The plain module beside a wrapped one: each of its forwards and backwards again, in PyTorch without a strategy.

forward     the same inputs, mode, attributes, buffers and random numbers, as they were before the wrapped forward
backward    from the gradients that reached the wrapped forward's outputs
noise       both again with other roundings, for how far two correct results may be apart
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.strategies.models.heard_draws import CannotReplay, GivenDraws
from mpkit.strategies.models.nested_values import flatten, rebuild
from mpkit.strategies.prepare.dry_run.copies import copy_model
from mpkit.strategies.proof.draws import StepDraws
from mpkit.strategies.proof.rounding import RoundingMode, coarsest, distance, largest
from mpkit.strategies.stage.stage import call, cast, cast_module
from mpkit.strategies.wrappers.loop_proof.attributes import (
    apart_from_graph,
    kept_attributes,
    kept_of_graph,
    settings,
    tensors_of,
)
from mpkit.strategies.wrappers.loop_proof.random_states import RandomStates

__all__ = ["Gradients", "PlainCopy", "PlainForward", "Seen", "add_gradients", "wide"]

REPETITIONS = 3
"""How often a result is computed again to find out what rounding does to it."""

CLOSE = 1e-3
"""The relative difference up to which another computation explains an output."""

Gradients = dict[str, Tensor]
Loss = Callable[[Any, Any], Any]
Seen = tuple["PlainForward", dict[int, Tensor], float]
"""A forward of which a backward was made: the gradients of its outputs by place, and the factor that they get."""


@dataclass
class PlainForward:
    """A forward of the wrapped module, and what is needed to repeat it.

    Attributes:
        args, kwargs: copies of the inputs.
        modes: attributes of modules, by module: numbers, words, and copies of tensors that a layer keeps.
        random: the states of random number generators.
        autocast: whether torch.autocast is on, and its dtype.
        buffers: before the forward, by name.
        draws: the random numbers of all ranks, where each draws its own for its part.
        outputs: the tensors that the plain module returned.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modes: dict[str, dict[str, Any]]
    random: RandomStates
    autocast: tuple[bool, torch.dtype]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    draws: StepDraws | None = None
    outputs: list[Tensor] = field(default_factory=list)

    def use_draws(self, *, again: bool = False) -> AbstractContextManager[Any]:
        """Return a context that gives the ranks' random numbers; not `again`, to a forward that a backward repeats."""
        if self.draws is None:
            return nullcontext()
        self.draws.begin()
        return GivenDraws(_never if again else self.draws.give)


class PlainCopy:
    """A copy of a module, made before it is wrapped.

    Args:
        module: the module.
        dtype: the dtype of 16 bits in which it computes; None for its own.
        loss: if it is given, a forward takes (inputs, targets) and returns the loss.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None, loss: Loss | None = None) -> None:
        self.module, self._dtype, self._loss = copy_model(module), dtype, loss
        if dtype is not None:
            cast_module(self.module, dtype)
        self.parameters = dict(self.module.named_parameters())
        self.device = next(iter(self.parameters.values())).device
        self._own = self._first = settings(self.module)

    def follow(self, module: nn.Module) -> None:
        """Note the attributes of the module once it is wrapped: what changes later, the copy follows."""
        self._first = settings(module)

    # ---- forward

    def note_start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlainForward:
        """Note what is there before a forward of the wrapped module."""
        modes = {name: self._follow_attributes(name, now) for name, now in settings(module).items()}
        for name, key, leaves, shape in kept_attributes(module):
            modes[name][key] = rebuild(shape, [apart_from_graph(leaf) for leaf in leaves])
        leaves, shape = flatten((args, kwargs))
        args, kwargs = rebuild(shape, [apart_from_graph(leaf) for leaf in leaves])
        kind = self.device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return PlainForward(args, kwargs, modes, RandomStates.capture(module, self.device), autocast)

    def _follow_attributes(self, name: str, now: dict[str, Any]) -> dict[str, Any]:
        """Return the attributes of the copy's module: its own where the wrapped module's are as at first."""
        first, own = self._first.get(name, {}), self._own.get(name, {})
        same = {key for key, value in now.items() if key in first and first[key] == value}
        return {key: own[key] if key in same else now[key] for key in now if key not in same or key in own}

    def forward(self, seen: PlainForward) -> list[Tensor]:
        """Repeat a forward, and return the tensors of its outputs and those that layers keep, each once."""
        for name, inner in self.module.named_modules():
            for key, value in seen.modes.get(name, {}).items():
                leaves, shape = flatten(value)
                vars(inner)[key] = rebuild(shape, [apart_from_graph(leaf, self._dtype) for leaf in leaves])
        # New ones: a graph of an earlier forward may keep those that there are.
        there = {name: (b, seen.buffers.get(name, b)) for name, b in self.module.named_buffers()}
        new = {id(b): now.clone() for b, now in there.values() if b.shape == now.shape}  # and not divided
        for inner in self.module.modules():
            for key, buffer in inner._buffers.items():
                inner._buffers[key] = new.get(id(buffer), buffer)
        leaves, shape = flatten((seen.args, seen.kwargs))
        args, kwargs = rebuild(shape, [apart_from_graph(leaf, self._dtype) for leaf in leaves])
        on, dtype = seen.autocast
        autocast = torch.autocast(self.device.type, dtype=dtype, enabled=on, cache_enabled=False)
        with torch.enable_grad(), autocast, self._random(seen), seen.use_draws():
            output = self._output(args, kwargs)
        output = output if self._dtype is None else cast(output, torch.float32)
        return tensors_of((output, kept_of_graph(self.module)))

    def _random(self, seen: PlainForward) -> AbstractContextManager[None]:
        return seen.random.draw_from(self.module, self.device)

    def _output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._loss is None:
            return self.module(*args, **kwargs)
        inputs, targets = args
        value = self._loss(call(self.module, inputs, first=True), targets)
        return value[0] / value[1] if isinstance(value, (tuple, list)) else value

    def eps(self, seen: PlainForward) -> float:
        """Return the coarsest rounding in a forward."""
        others = [leaf for leaf in flatten((seen.args, seen.kwargs))[0] if isinstance(leaf, Tensor)]
        others += [torch.empty(0, dtype=seen.autocast[1])] if seen.autocast[0] else []
        return torch.finfo(coarsest(self.module, [*others, *seen.outputs])).eps

    def drew(self, seen: PlainForward) -> bool:
        """Return whether torch's random numbers were drawn since a forward began."""
        return seen.random.drew(RandomStates.capture(self.module, self.device))

    def mode_of(self, seen: PlainForward, got: list[Tensor]) -> str:
        """Return the likely cause of other outputs: the wrapped module computed in the other mode, or none."""
        modes = seen.modes
        for name, training in (("training", True), ("evaluation", False)):
            seen.modes = {inner: {**of, "training": training} for inner, of in modes.items()}
            with self._keep_unchanged():
                other = self.forward(seen)
            seen.modes = modes
            near = (distance(a, b) <= CLOSE * largest(b) for a, b in zip(got, other, strict=True))
            if all(near):
                return f"The wrapped module computed in {name} mode."
        return (
            "It computed with other weights, buffers or random numbers, or depends on something that is not in the "
            "module: the rank, a global, the process group."
        )

    # ---- backward

    def backward(self, seen: PlainForward, received: dict[int, Tensor], scale: float) -> None:
        """Add the gradients of a backward, times a scale, to those of the parameters."""
        outputs = {i: seen.outputs[i] for i in received if seen.outputs[i].requires_grad}
        scaled = [received[i] * scale for i in outputs]
        if outputs:
            with seen.use_draws(again=True):
                torch.autograd.backward(list(outputs.values()), scaled, retain_graph=True)

    def take(self, scale: float) -> Gradients:
        """Return the gradients, divided by their scale, in float64, and drop them."""
        made = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        for parameter in self.parameters.values():
            parameter.grad = None
        return {name: wide(gradient) / scale for name, gradient in made.items()}

    # ---- noise

    def noise_of_forward(self, seen: PlainForward) -> list[float]:
        """Return how far roundings bring the outputs and then the buffers of a forward apart."""
        known, again = [*seen.outputs, *self.module.buffers()], []
        for seed in range(REPETITIONS):
            with self._keep_unchanged():
                again.append([*self._forward_rounded(seed, seen), *self.module.buffers()])
        return [max(distance(made[i], one) for made in again) for i, one in enumerate(known)]

    def noise(self, step: list[Seen], gradients: Gradients) -> dict[str, float]:
        """Return how far roundings bring the gradients of a step apart, by name."""
        spread = dict.fromkeys(self.parameters, 0.0)
        with self._keep_unchanged():
            for seed in range(REPETITIONS):
                total: Gradients = {}
                for seen, received, scale in step:
                    outputs, seen.outputs = seen.outputs, self._forward_rounded(seed, seen)
                    with RoundingMode(seed):
                        self.backward(seen, received, scale)
                    seen.outputs = outputs
                    add_gradients(total, self.take(scale))
                for name, gradient in total.items():
                    if name in gradients:
                        spread[name] = max(spread[name], distance(gradient, gradients[name]))
        return spread

    def _forward_rounded(self, seed: int, seen: PlainForward) -> list[Tensor]:
        with RoundingMode(seed):
            return self.forward(seen)

    @contextmanager
    def _keep_unchanged(self) -> Iterator[None]:
        before = [(inner, dict(vars(inner)), dict(inner._buffers)) for inner in self.module.modules()]
        yield
        for inner, attributes, buffers in before:
            vars(inner).update(attributes)
            inner._buffers.update(buffers)


def _never(shape: tuple[int, ...], probability: float | None) -> Tensor:
    raise CannotReplay("a forward that a backward repeats draws random numbers, and ranks draw their own")


def add_gradients(total: Gradients, more: Gradients) -> None:
    """Add gradients to a total."""
    for name, gradient in more.items():
        total[name] = total[name] + gradient if name in total else gradient


def wide(gradient: Tensor) -> Tensor:
    """Return a dense gradient as a copy in 64 bits."""
    plain = gradient.detach().as_subclass(Tensor)
    return plain.to_dense().to(torch.complex128 if plain.is_complex() else torch.float64, copy=True)
