"""The plain module beside a wrapped one: each of its forwards and backwards again, in PyTorch without a strategy.

forward     the same inputs, mode, attributes, buffers and random numbers, as they were before the wrapped forward
backward    from the gradients that reached the wrapped forward's outputs
noise       both again with other roundings, for how far two correct results may be apart
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.strategies.models.heard_draws import CannotReplay, GivenDraws
from mpkit.strategies.models.nested_values import flatten, rebuild
from mpkit.strategies.proof.draws import StepDraws
from mpkit.strategies.proof.kept_values import (
    RandomStates,
    apart_from_graph,
    kept_attributes,
    kept_of_graph,
    settings,
    tensors_of,
)
from mpkit.strategies.proof.noise import Noise
from mpkit.strategies.proof.rounding import RoundingMode, coarsest, distance, largest
from mpkit.strategies.stage.stage import call, cast_module

__all__ = ["CLOSE", "Gradients", "PlainForward", "PlainModule", "Received", "wide"]

CLOSE = 1e-3
"""The relative difference up to which another computation explains a result."""

Gradients = dict[str, Tensor]
Loss = Callable[[Any, Any], Any]
Received = tuple["PlainForward", dict[int, Tensor]]
"""A forward of which a backward was made: the gradients of its outputs, by place."""


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


class PlainModule:
    """A module without a strategy, which follows a wrapped one.

    Args:
        module: the plain module; its weights, buffers and attributes are changed.
        dtype: the dtype of 16 bits in which the wrapped one computes; None for its own.
        loss: if it is given, a forward takes (inputs, targets) and returns the loss.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None = None, loss: Loss | None = None) -> None:
        self.module, self._dtype, self._loss = module, dtype, loss
        if dtype is not None:
            cast_module(module, dtype)
        self.parameters = dict(module.named_parameters())
        self.device = next(iter(self.parameters.values())).device
        self._own = self._first = settings(module)

    def follow(self, module: nn.Module) -> list[str]:
        """Follow a wrapped module from now on: what changes in its attributes later; return where modes differ now."""
        self._first = settings(module)
        return [
            f"{name or 'the model'} is in another mode than the plain module."
            for name, now in self._first.items()
            if name in self._own and now["training"] != self._own[name]["training"]
        ]

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
        buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        random = RandomStates.capture(module, self.device)
        return PlainForward(args, kwargs, modes, random, autocast, buffers)

    def _follow_attributes(self, name: str, now: dict[str, Any]) -> dict[str, Any]:
        """Return the attributes of the plain module: its own where the wrapped module's are as at first."""
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
        new = {
            id(b): now.to(b, copy=True) for b, now in there.values() if b.shape == now.shape
        }  # not divided
        for inner in self.module.modules():
            for key, buffer in inner._buffers.items():
                inner._buffers[key] = new.get(id(buffer), buffer)
        leaves, shape = flatten((seen.args, seen.kwargs))
        args, kwargs = rebuild(shape, [apart_from_graph(leaf, self._dtype) for leaf in leaves])
        on, dtype = seen.autocast
        autocast = torch.autocast(self.device.type, dtype=dtype, enabled=on, cache_enabled=False)
        random = seen.random.draw_from(self.module, self.device)
        with torch.enable_grad(), autocast, random, seen.use_draws():
            output = self._output(args, kwargs)
        return tensors_of((output, kept_of_graph(self.module)))

    def _output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._loss is None:
            return self.module(*args, **kwargs)
        inputs, targets = args
        value = self._loss(call(self.module, inputs, first=True), targets)
        return value[0] / value[1] if isinstance(value, (tuple, list)) else value

    def dtype_of(self, seen: PlainForward) -> torch.dtype:
        """Return the dtype of a forward with the coarsest rounding."""
        others = [leaf for leaf in flatten((seen.args, seen.kwargs))[0] if isinstance(leaf, Tensor)]
        others += [torch.empty(0, dtype=seen.autocast[1])] if seen.autocast[0] else []
        return coarsest(self.module, [*others, *seen.outputs])

    def drew(self, seen: PlainForward) -> bool:
        """Return whether torch's random numbers were drawn since a forward began."""
        return seen.random.drew(RandomStates.capture(self.module, self.device))

    def explains(
        self, seen: PlainForward, got: Sequence[Tensor], *, training: bool | None = None,
        weights: dict[str, Tensor] | None = None,
    ) -> bool:  # fmt: skip
        """Return whether another mode, or other weights, make a forward's outputs of what it got."""
        modes = seen.modes
        if training is not None:
            seen.modes = {inner: {**of, "training": training} for inner, of in modes.items()}
        now = {name: p.detach().clone() for name, p in self.parameters.items()} if weights else {}
        with self._keep_unchanged():
            self._set_weights(weights or {})
            other = self.forward(seen)
            self._set_weights(now)
        seen.modes = modes
        pairs = zip(got, other, strict=True)
        return all(a.shape == b.shape and distance(a, b) <= CLOSE * largest(b) for a, b in pairs)

    @torch.no_grad()
    def _set_weights(self, weights: dict[str, Tensor]) -> None:
        for name, weight in weights.items():
            self.parameters[name].copy_(weight)

    # ---- backward

    def backward(self, received: Sequence[Received]) -> Gradients:
        """Return the gradients of a backward from the gradients that outputs received, in float64."""
        for seen, gradients in received:
            outputs = {i: seen.outputs[i] for i in gradients if seen.outputs[i].requires_grad}
            if outputs:
                given = [gradients[i].to(output) for i, output in outputs.items()]
                with seen.use_draws(again=True):
                    torch.autograd.backward(list(outputs.values()), given, retain_graph=True)
        made = {name: wide(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        for parameter in self.parameters.values():
            parameter.grad = None
        return made

    # ---- noise

    def noise_of_forward(self, seen: PlainForward) -> Noise:
        """Return how far roundings bring a forward's results apart, by "output 0" and "buffer NAME"."""

        def repeat(seed: int | None) -> dict[str, Tensor]:
            with self._keep_unchanged(), _rounded(seed):
                outputs = self.forward(seen)
                buffers = dict(self.module.named_buffers())
            made = {f"output {i}": output for i, output in enumerate(outputs)}
            return made | {f"buffer {name}": buffer for name, buffer in buffers.items()}

        return Noise(repeat, self.dtype_of(seen))

    def noise_of_backwards(self, backwards: Sequence[Sequence[Received]]) -> Noise:
        """Return how far roundings bring the gradients of a step apart, by name."""

        def repeat(seed: int | None) -> Gradients:
            total: Gradients = {}
            with self._keep_unchanged():
                for received in backwards:
                    for seen, _ in received:
                        with _rounded(seed):
                            seen.outputs = self.forward(seen)
                    with _rounded(seed):
                        made = self.backward(received)
                    for name, gradient in made.items():
                        total[name] = total[name] + gradient if name in total else gradient
            return total

        return Noise(repeat, torch.float32)

    @contextmanager
    def _keep_unchanged(self) -> Iterator[None]:
        before = [(inner, dict(vars(inner)), dict(inner._buffers)) for inner in self.module.modules()]
        yield
        for inner, attributes, buffers in before:
            vars(inner).update(attributes)
            inner._buffers.update(buffers)


def _rounded(seed: int | None) -> AbstractContextManager[Any]:
    return nullcontext() if seed is None else RoundingMode(seed)


def _never(shape: tuple[int, ...], probability: float | None) -> Tensor:
    raise CannotReplay("a forward that a backward repeats draws random numbers, and ranks draw their own")


def wide(gradient: Tensor) -> Tensor:
    """Return a dense gradient as a copy in 64 bits."""
    plain = gradient.detach()
    return plain.to_dense().to(torch.complex128 if plain.is_complex() else torch.float64, copy=True)
