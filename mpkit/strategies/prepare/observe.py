"""Run model and loss once on fake tensors, which have shapes but no content.

Under torch's FakeTensorMode every operation computes shapes and no numbers, so a model of any size runs in
milliseconds, and inputs that it would refuse are refused here, before any rank starts. A layer that looks at its
tensors' values cannot run on fake tensors; then one micro-batch is computed for real, on a copy of the model. Once the
shapes are known, FLOPs and bytes are counted layer by layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpkit.common.exceptions import fakes_or_real, one_line
from mpkit.common.torch_private import TorchDispatchMode, peek_interpreter_stack
from mpkit.strategies.data.microbatch import Value, map_tensors
from mpkit.strategies.models.chain import layers_of
from mpkit.strategies.models.heard_draws import draws_numbers
from mpkit.strategies.models.nested_values import flatten
from mpkit.strategies.models.randomness import SEEDED
from mpkit.strategies.partition.value import Boundary, LayerNumbers
from mpkit.strategies.prepare.arguments import CROSS_ENTROPY
from mpkit.strategies.prepare.copies import copy_model, without_content
from mpkit.strategies.prepare.isolation import quiet
from mpkit.strategies.replicas.batchnorm import Alone, batch_norms, over_whole_batch
from mpkit.strategies.stage.stage import PRECISIONS, call, cast
from mpkit.trace.record.fake_mode import FakeMode
from mpkit.trace.record.flops import Flops, count

__all__ = ["dry_run", "narrow_copy", "of_wide_outputs", "quiet", "whole"]

Loss = Callable[[Any, Any], Any]


def whole(value: Value) -> Value:
    """Return the whole value."""
    return value


def dry_run(
    model: nn.Module,
    shapes: Mapping[Hashable, tuple[Value, Value]],
    loss: Loss,
    *,
    precision: str = "full",
    whole_statistics: bool = False,
    counts: bool = True,
    cut: Callable[[Value], Value] = whole,
    attention: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> dict[Hashable, list[LayerNumbers]]:
    """Return the numbers of each layer, and last of the loss, for micro-batches of every shape, by signature.

    Args:
        shapes: a micro-batch of every shape, by its signature (`mpkit.strategies.data.microbatch.one_of_each_shape`).
        precision: as in `Plan`.
        whole_statistics: BatchNorm's statistics are over the whole batch, so a rank may have a single sample.
        counts: whether to count FLOPs.
        cut: returns a rank's part of inputs or targets where ranks share sequences.
        attention: returns the context in which a forward runs.

    Raises:
        ValueError: a layer refuses its inputs, or the loss is not a scalar.
    """
    numbers: dict[Hashable, list[LayerNumbers]] = {}
    dtype = PRECISIONS.get(precision)
    if dtype is not None:
        model, loss = narrow_copy(model, dtype), of_wide_outputs(loss)
    if whole_statistics and batch_norms(model):
        model = copy_model(model)
        over_whole_batch(model, Alone())
    fakes = _Fakes(model)
    for key, (inputs, targets) in shapes.items():
        x, y = cut(inputs if dtype is None else cast(inputs, dtype)), cut(targets)
        with attention():
            passed = _walk_parts(fakes, model, x, y, loss)
            numbers[key] = (
                count_layers(model, x, y, loss, passed)
                if counts
                else [LayerNumbers(Flops(), *each) for each in (*passed, LayerOutput(None))]
            )
    return numbers


def _walk_parts(fakes: _Fakes, model: nn.Module, x: Value, y: Value, loss: Loss) -> list[LayerOutput]:
    # If the model refuses its inputs, it does so again on real tensors, with the error that the user knows.
    return fakes_or_real(
        lambda: fakes.walk(x, y, loss),
        lambda: _walk_for_real(model, x, y, loss),
        f"A micro-batch of {type(model).__name__}",
    )


def narrow_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of the model in another dtype."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        narrow = cast(tensor.detach(), dtype)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(narrow, tensor.requires_grad) if is_parameter else narrow
    return copy_model(model, memo)


def of_wide_outputs(loss: Loss) -> Loss:
    """Return the loss with its outputs cast to fp32, whatever the model computes in."""
    return lambda outputs, targets: loss(cast(outputs, torch.float32), targets)


class _Fakes:
    """A copy of the model with fake tensors, created when first needed and usable for any shape."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._mode = FakeMode()
        self._copy: nn.Module | None = None

    def walk(self, inputs: Value, targets: Value, loss: Loss) -> list[LayerOutput]:
        """Return the output of each layer; fails where the model fails or needs the tensors' content."""
        with self._mode, _DoubtDtypes():  # type: ignore[no-untyped-call]
            if self._copy is None:
                self._copy = without_content(self._model, self._mode)
            x, y = (map_tensors(self._mode.from_tensor, value) for value in (inputs, targets))
            return _walk(self._copy, x, y, loss)


class _DoubtDtypes(TorchDispatchMode):
    """A mode for dtypes that fake tensors accept and real ones refuse, such as a product of float64 with float32.

    Where an operator is given several dtypes that it may not accept together, it raises, so that the real run decides.
    """

    ALIKE = ("linear", "mm", "addmm", "bmm", "baddbmm", "native_layer_norm", "native_group_norm")
    INDEXED = ("nll_loss_forward", "nll_loss2d_forward")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in self.ALIKE and len({value.dtype for value in args if isinstance(value, Tensor)}) > 1:
            raise TypeError(f"{name} of several dtypes")
        if name in self.INDEXED and args[1].dtype != torch.int64:
            raise TypeError(f"{name} of targets {args[1].dtype}")
        return func(*args, **(kwargs or {}))


def _walk_for_real(model: nn.Module, inputs: Value, targets: Value, loss: Loss) -> list[LayerOutput]:
    held = copy_model(model)
    x, y = (map_tensors(torch.clone, value) for value in (inputs, targets))
    return _walk(held, x, y, loss)


OWN_SEED = 0x6D706B6974
"""The seed during a dry run: one that nobody else sets."""


def _is_users(seed: int) -> bool:
    """Return whether a seed was set by the user's code: those of divided layers (`own_draws`) are hashes of 63 bits."""
    return seed != OWN_SEED and seed < 2**32


class _SeedListener(TorchDispatchMode):
    """A mode that notices draws from torch's generator after another seed was set inside."""

    seeded = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seeded = self.seeded or (draws_numbers(func) and _is_users(torch.initial_seed()))
        return func(*args, **(kwargs or {}))


def _walk(model: nn.Module, inputs: Value, targets: Value, loss: Loss) -> list[LayerOutput]:
    """Run layer after layer and then the loss; return each output and whether the layer writes into its inputs."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(OWN_SEED)
    try:
        with _SeedListener() as heard:  # type: ignore[no-untyped-call]
            passed = _walk_layers(model, inputs, targets, loss)
        if heard.seeded or _is_users(torch.initial_seed()):
            raise ValueError(SEEDED)
    finally:
        torch.default_generator.set_state(state)
    return passed


def _walk_layers(model: nn.Module, inputs: Value, targets: Value, loss: Loss) -> list[LayerOutput]:
    passed = []
    value: Any = inputs
    layers, effects = layers_of(model), _Effects(model)
    for i, (name, layer) in enumerate(layers):
        given, before = value, _versions(value)
        try:
            value = call(layer, value, first=i == 0)
        except Exception as error:
            whole = "data of this shape" if i == 0 else "what its own layers make of data of this shape"
            raise ValueError(
                f"The model refuses {whole}: layer {i} ({name or 'the model'}, {type(layer).__name__}) was given "
                f"{_describe(given)} and said: {one_line(error)}"
            ) from None
        passed.append(LayerOutput(Boundary.from_output(value), _versions(given) != before, *effects.take()))
    effects.end()
    _check_loss(loss, value, targets)
    return passed


class _Effects:
    """Notes, by hooks on a copy's layers with parameters, which of them a forward transforms or differentiates."""

    def __init__(self, model: nn.Module) -> None:
        self._transformed: list[str] = []
        self._differentiated: list[str] = []
        self._handles: list[Any] = []
        for name, layer in model.named_modules():
            if next(layer.parameters(recurse=False), None) is not None:
                self._handles.append(layer.register_forward_pre_hook(partial(self._before, name)))
                self._handles.append(layer.register_forward_hook(partial(self._after, name)))

    def _before(self, name: str, *_: Any) -> None:
        if peek_interpreter_stack() is not None:
            self._transformed.append(name)

    def _after(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        for leaf in flatten(output)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self._differentiated.append(name))

    def take(self) -> tuple[str, str]:
        """Return the first layer of each kind since the last call."""
        found = (next(iter(self._transformed), ""), next(iter(self._differentiated), ""))
        self._transformed.clear()
        self._differentiated.clear()
        return found

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()


def _versions(value: Any) -> list[int]:
    """Return how often each tensor has been written into."""
    tensors = value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else (value,)
    return [tensor._version for tensor in tensors if isinstance(tensor, Tensor)]


def _check_loss(loss: Loss, outputs: Any, targets: Value) -> None:
    given = f"outputs {_describe(outputs)} and targets {_describe(targets)}"
    try:
        value = loss(outputs, targets)
    except Exception as error:
        raise ValueError(f"The loss refuses {given}: {one_line(error)}") from None
    wanted = f"It has to give a scalar tensor, the mean over the batch, such as {CROSS_ENTROPY} does, or (total, count)"
    if not isinstance(value, Tensor):
        raise ValueError(
            f"The loss made {type(value).__name__} of {given}. {wanted}; .item() would cut it off."
        )
    if value.numel() != 1:
        raise ValueError(
            f"The loss made a tensor of shape {list(value.shape)} of {given}, not a scalar. {wanted}: .mean() makes "
            "one of it, and the losses of torch.nn do with reduction='mean'."
        )
    if value.is_complex():
        raise ValueError(
            f"The loss made a complex number, {_describe(value)}, of {given}, and nothing is less than it. {wanted}: "
            "its .abs() or .real.square() is real."
        )
    if not value.requires_grad:
        raise ValueError(
            f"The loss does not depend on any parameter that is trained, so there is nothing to do: either all have "
            f"requires_grad=False, or it was cut off by .detach() or torch.no_grad(). {wanted}."
        )


def _describe(value: Any) -> str:
    """Describe a value by its shapes and dtypes, as in "[8, 4] float32"."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_describe(tensor)}" for name, tensor in value.items()) + "}"
    boundary = Boundary.from_output(value)
    return type(value).__name__ if boundary is None else str(boundary)


# ---- FLOPs, once the shapes are known ------------------------------------------------------------------------

UNKNOWN = Flops(why="what the layer before it returns is not known before the run")


class LayerOutput(NamedTuple):
    """What a layer makes: its output, None if it cannot be sent; the rest as in `LayerNumbers`."""

    output: Boundary | None
    in_place: bool = False
    transformed: str = ""
    differentiated: str = ""


def count_layers(
    model: nn.Module,
    inputs: Value,
    targets: Value,
    loss: Callable[[Any, Any], Any],
    passed: list[LayerOutput],
) -> list[LayerNumbers]:
    """Return the FLOPs and bytes of each layer, and last those of the loss; 0 where they cannot be counted.

    Identical layers, such as the blocks of a transformer, are counted once.
    """
    counted: dict[Hashable, Flops] = {}
    numbers = []
    given: Boundary | None = None
    for i, ((_, layer), each) in enumerate(zip(layers_of(model), passed, strict=True)):
        if i == 0:
            flops = _count_first(layer, inputs)
        else:
            key = (make(layer), given)
            if key not in counted:
                counted[key] = count(layer, *_empty(given)) if given is not None else UNKNOWN
            flops = counted[key]
        numbers.append(LayerNumbers(flops, *each))
        given = each.output
    last = count(loss, *_empty(given), targets) if given is not None else UNKNOWN
    return [*numbers, LayerNumbers(last, None)]


def _count_first(layer: nn.Module, inputs: Value) -> Flops:
    """Count the model's first layer, with its inputs by position or by name."""
    if not isinstance(inputs, dict):
        return count(layer, *(inputs if isinstance(inputs, tuple) else (inputs,)))
    return count(lambda named: layer(**named), inputs)


def _empty(boundary: Boundary) -> tuple[Tensor | tuple[Tensor, ...]]:
    """Return tensors of arbitrary content with the specs of this boundary, as the argument of the next layer."""
    tensors = tuple(
        torch.empty(spec.shape, dtype=spec.dtype, requires_grad=spec.requires_grad) for spec in boundary.specs
    )
    return (boundary.pack(tensors),)


def make(layer: nn.Module) -> Hashable:
    """Return a key that is equal for layers that compute the same, apart from the content of their tensors.

    The key consists of the classes and plain settings of all modules within, and the shapes of their tensors. Any
    other object that a module holds makes its key unique.

    >>> make(nn.Linear(2, 3)) == make(nn.Linear(2, 3)), make(nn.Dropout(0.1)) == make(nn.Dropout(0.2))
    (True, False)
    """
    parts: list[Hashable] = []
    for name, module in layer.named_modules():
        settings = tuple(
            (key, value if _is_plain(value) else id(value))
            for key, value in sorted(vars(module).items())
            if not key.startswith("_")
        )
        hooks = tuple(
            id(hook) for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        )
        own = (*module._parameters.items(), *module._buffers.items())
        tensors = tuple(
            (key, None if value is None else (tuple(value.shape), value.dtype, value.requires_grad))
            for key, value in own
        )
        parts.append((name, type(module), settings, hooks, tensors))
    return tuple(parts)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
