"""The plain module beside a wrapped one: the forwards and backwards of a step again, in PyTorch without a strategy.

forward     the same inputs, mode, attributes, buffers and random numbers, as they were before the wrapped forward
backward    from the gradients that reached the wrapped outputs

A step can be repeated with other roundings, which tells how far two correct results may be apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.strategies.models.heard_draws import CannotReplay, GivenDraws
from mpkit.strategies.models.nested_values import ATOMS, flatten, rebuild
from mpkit.strategies.models.randomness import RandomState
from mpkit.strategies.proof.draws import StepDraws
from mpkit.strategies.proof.rounding import coarsest, distance, largest, rounded
from mpkit.strategies.stage.stage import call, cast_module

CLOSE = 1e-3  # the relative difference up to which another computation explains a result
OF_TORCH = {key for key in vars(nn.Module()) if key != "training"}  # attributes that are PyTorch's own

Gradients = dict[str, Tensor]
Loss = Callable[[Any, Any], Any]
Received = dict[int, dict[int, Tensor]]
"""What a backward began from: by the number of a forward in the step, the gradients of its outputs, by place."""


@dataclass
class PlainForward:
    """A forward of the wrapped module, and what is needed to repeat it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modes: dict[str, dict[str, Any]]  # modules' attributes: numbers, words, and copies of tensors
    random: RandomStates
    autocast: tuple[bool, torch.dtype]  # whether torch.autocast is on, and its dtype
    buffers: dict[str, Tensor]  # before the forward, by name
    draws: StepDraws | None = None  # the random numbers of all ranks, where each draws its own for its part
    got: dict[str, Tensor] = field(default_factory=dict)  # its "output NUMBER" and "buffer NAME"

    @property
    def outputs(self) -> list[Tensor]:
        """The tensors that the wrapped module returned."""
        return [tensor for name, tensor in self.got.items() if name.startswith("output ")]

    def use_draws(self, *, again: bool = False) -> AbstractContextManager[Any]:
        """Return a context that gives a forward the ranks' random numbers, but not one that a backward repeats."""
        if self.draws is None:
            return nullcontext()
        self.draws.begin()
        return GivenDraws(_never if again else self.draws.give)


def _never(shape: tuple[int, ...], probability: float | None) -> Tensor:
    raise CannotReplay("a forward that a backward repeats draws random numbers, and ranks draw their own")


class PlainModule:
    """A module without a strategy, which follows a wrapped one; its weights, buffers and attributes are changed.

    Args:
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
        """Follow what changes in a wrapped module's attributes from now on; return where modes differ now."""
        self._first = settings(module)
        return [
            f"{name or 'the model'} is in another mode than the plain module."
            for name, now in self._first.items()
            if name in self._own and now["training"] != self._own[name]["training"]
        ]

    # ---- forward

    def note_start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlainForward:
        """Note the state before a forward of the wrapped module."""
        modes = {name: self._follow_attributes(name, now) for name, now in settings(module).items()}
        for name, key, leaves, shape in kept_attributes(module):
            modes[name][key] = rebuild(shape, [_apart(leaf) for leaf in leaves])
        args, kwargs = _copied((args, kwargs))
        kind = self.device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        return PlainForward(args, kwargs, modes, RandomStates(module, self.device), autocast, buffers)

    def _follow_attributes(self, name: str, now: dict[str, Any]) -> dict[str, Any]:
        """Return the plain module's attributes: its own where the wrapped module's are still as at first."""
        first, own = self._first.get(name, {}), self._own.get(name, {})
        same = {key for key, value in now.items() if key in first and first[key] == value}
        return {key: own[key] if key in same else now[key] for key in now if key not in same or key in own}

    def forward(self, seen: PlainForward) -> list[Tensor]:
        """Repeat a forward; return the tensors of its outputs and those that layers keep, each once."""
        for name, inner in self.module.named_modules():
            for key, value in seen.modes.get(name, {}).items():
                vars(inner)[key] = _copied(value, self._dtype)
        # New ones: a graph of an earlier forward may keep those that there are.
        there = [(b, seen.buffers.get(name, b)) for name, b in self.module.named_buffers()]
        new = {id(b): now.to(b, copy=True) for b, now in there if b.shape == now.shape}  # not divided
        for inner in self.module.modules():
            for key, buffer in inner._buffers.items():
                inner._buffers[key] = new.get(id(buffer), buffer)
        args, kwargs = _copied((seen.args, seen.kwargs), self._dtype)
        on, dtype = seen.autocast
        autocast = torch.autocast(self.device.type, dtype=dtype, enabled=on, cache_enabled=False)
        states = seen.random.draw_from(self.module, self.device)
        with torch.enable_grad(), autocast, states, seen.use_draws():
            output = self._output(args, kwargs)
        return tensors_of((output, kept_of_graph(self.module)))

    def _output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._loss is None:
            return self.module(*args, **kwargs)
        inputs, targets = args
        value = self._loss(call(self.module, inputs, first=True), targets)
        return value[0] / value[1] if isinstance(value, (tuple, list)) else value

    def dtype_of(self, forwards: Sequence[PlainForward]) -> torch.dtype:
        """Return the dtype of forwards with the coarsest rounding."""
        others = [torch.empty(0, dtype=seen.autocast[1]) for seen in forwards if seen.autocast[0]]
        data = [tensors_of((seen.args, seen.kwargs, seen.outputs)) for seen in forwards]
        return coarsest(self.module, others, *data)

    def drew(self, seen: PlainForward) -> bool:
        """Return whether torch's random numbers were drawn since a forward began."""
        pairs = zip(seen.random.torch, RandomStates(self.module, self.device).torch, strict=True)
        return not all(torch.equal(before, now) for before, now in pairs)

    def explains(
        self, seen: PlainForward, *, training: bool | None = None, weights: Mapping[str, Tensor] | None = None
    ) -> bool:
        """Return whether another mode, or other weights, turn a forward's inputs into its outputs."""
        modes = seen.modes
        if training is not None:
            seen.modes = {inner: {**of, "training": training} for inner, of in modes.items()}
        now = {name: p.detach().clone() for name, p in self.parameters.items()} if weights else {}
        self._set_weights(weights or {})
        other = self.forward(seen)
        self._set_weights(now)
        seen.modes = modes
        pairs = zip(seen.outputs, other, strict=True)
        return all(a.shape == b.shape and distance(a, b) <= CLOSE * largest(b) for a, b in pairs)

    @torch.no_grad()
    def _set_weights(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            self.parameters[name].copy_(weight)

    # ---- a step

    def repeat(
        self, forwards: Sequence[PlainForward], backwards: Sequence[Received], seed: int | None = None
    ) -> tuple[list[dict[str, Tensor]], list[Gradients]]:
        """Return the results of each forward, as in `PlainForward.got`, and the gradients of each backward, in float64.

        `seed` is that of other roundings; None: those as they are.
        """
        outputs, made, own = list[list[Tensor]](), list[dict[str, Tensor]](), list[Gradients]()
        with rounded(seed):
            for seen in forwards:
                outputs.append(self.forward(seen))
                named = {f"output {i}": output.detach() for i, output in enumerate(outputs[-1])}
                made.append(named | {f"buffer {name}": b for name, b in self.module.named_buffers()})
            for received in backwards:
                for number, gradients in received.items():
                    heard = {place: outputs[number][place] for place in gradients}
                    heard = {place: output for place, output in heard.items() if output.requires_grad}
                    given = [gradients[place].to(output) for place, output in heard.items()]
                    if heard:
                        with forwards[number].use_draws(again=True):
                            torch.autograd.backward(list(heard.values()), given, retain_graph=True)
                own.append({n: wide(p.grad) for n, p in self.parameters.items() if p.grad is not None})
                for parameter in self.parameters.values():
                    parameter.grad = None
        return made, own


def wide(gradient: Tensor) -> Tensor:
    """Return a dense gradient as a copy in 64 bits."""
    plain = gradient.detach()
    return plain.to_dense().to(torch.complex128 if plain.is_complex() else torch.float64, copy=True)


# ---- what modules keep, and where tensors are in what they return


def settings(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the plain attributes of a module's modules, `training` among them, by module.

    >>> settings(nn.Dropout(0.5))
    {'': {'training': True, 'p': 0.5, 'inplace': False}}
    """
    kinds = (bool, int, float, str, type(None))
    return {
        name: {k: v for k, v in vars(inner).items() if isinstance(v, kinds) and k not in OF_TORCH}
        for name, inner in module.named_modules()
    }


def kept_attributes(module: nn.Module) -> Iterator[tuple[str, str, list[Any], Any]]:
    """Yield the attributes of a module's modules that hold tensors: module, name, leaves and structure."""
    for name, inner in module.named_modules():
        for key, value in list(vars(inner).items()):
            if key in OF_TORCH or isinstance(value, ATOMS):
                continue
            leaves, shape = flatten(value)
            if any(isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) for leaf in leaves):
                yield name, key, leaves, shape


def kept_of_graph(module: nn.Module) -> list[Tensor]:
    """Return the tensors that layers keep of a forward, with its graph: a term of the loss, a state."""
    leaves = (leaf for _, _, leaves, _ in kept_attributes(module) for leaf in leaves)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a value, each once."""
    return list({id(leaf): leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)}.values())


def _copied(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a value with copies of its tensors that belong to no graph but their own."""
    leaves, shape = flatten(value)
    return rebuild(shape, [_apart(leaf, dtype) for leaf in leaves])


def _apart(leaf: Any, dtype: torch.dtype | None = None) -> Any:
    if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
        return leaf
    made = leaf.detach().clone()
    made = made.to(dtype) if dtype is not None and made.is_floating_point() else made
    if not leaf.requires_grad:
        return made
    with torch.enable_grad():
        return made.requires_grad_().clone()  # no leaf, which a layer could not change in place


class RandomStates:
    """The states of all random number generators that a forward may draw from, at one moment."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._state = RandomState.now(device)
        self.torch = [each for each in (self._state.host, self._state.gpu) if each is not None]  # CPU, GPU
        self._own = [generator.get_state() for generator in _generators(module)]

    @contextmanager
    def draw_from(self, module: nn.Module, device: torch.device) -> Iterator[None]:
        """Draw from these states within the block; afterwards all generators are as before."""
        now = RandomStates(module, device)
        self._set(module)
        try:
            yield
        finally:
            now._set(module)

    def _set(self, module: nn.Module) -> None:
        self._state.restore()
        for generator, state in zip(_generators(module), self._own, strict=True):
            generator.set_state(state)


def _generators(module: nn.Module) -> list[torch.Generator]:
    every = (value for inner in module.modules() for value in vars(inner).values())
    return [value for value in every if isinstance(value, torch.Generator)]
