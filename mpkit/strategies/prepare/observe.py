"""One run of model and loss, forward and backward, from which everything else that is known before the start is read.

Under torch's FakeTensorMode every operation computes shapes and no numbers, so a model of any size runs in
milliseconds, and rejects unsuitable inputs before any rank starts. A layer that looks at its tensors' values cannot run
on fake tensors; then one micro-batch is computed for real, on a copy of the model.

    forward     layer by layer: what each hands on, its FLOPs and bytes, whether it writes into its inputs
    loss        it has to be a scalar that depends on trained parameters
    backward    of each layer by itself

On fake tensors one of several layers that are alike, such as the blocks of a transformer, is run for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.common.exceptions import one_line
from mpkit.plan.plan import Plan
from mpkit.strategies.comm.fake_group import FakeGroup
from mpkit.strategies.data.microbatch import Value
from mpkit.strategies.models.chain import layers_of, repeated_blocks
from mpkit.strategies.models.nested_values import flatten, rebuild
from mpkit.strategies.partition.value import Boundary, LayerNumbers
from mpkit.strategies.partition.walk import HOOKS
from mpkit.strategies.prepare.arguments import CROSS_ENTROPY
from mpkit.strategies.prepare.copies import DryRuns
from mpkit.strategies.replicas.batchnorm import over_whole_batch
from mpkit.strategies.stage.split_backward import input_grads
from mpkit.strategies.stage.stage import PRECISIONS, call, cast
from mpkit.trace.record.flops import Attentions, Flops, Meter, leaves_of

Loss = Callable[[Any, Any], Any]
Around = Callable[[], AbstractContextManager[Any]]
"""Makes the context in which a forward runs."""


def whole(value: Value) -> Value:
    """Return the whole value."""
    return value


def observe(
    model: nn.Module, shapes: Mapping[Hashable, tuple[Value, Value]], loss: Loss, plan: Plan, *,
    counts: bool = True, halves: bool = False, cut: Callable[[Value], Value] = whole,
    attention: Around = nullcontext,
) -> dict[Hashable, list[LayerNumbers]]:  # fmt: skip
    """Return the numbers of each layer, and last of the loss, for micro-batches of every shape, by signature.

    Args:
        shapes: a micro-batch of every shape, by its signature (`mpkit.strategies.data.microbatch.one_of_each_shape`).
        counts: whether the backward is counted; `halves`: in two halves.
        cut: returns a rank's part of inputs or targets where ranks share sequences.
        attention: returns the context in which a forward runs.
    """
    dtype = PRECISIONS.get(plan.precision)
    loss = loss if dtype is None else of_wide_outputs(loss)

    def ready(copied: nn.Module) -> None:
        if plan.dp * plan.microbatches > 1 and plan.batchnorm == "sync":  # a share may be a single sample
            over_whole_batch(copied, FakeGroup(1))

    runs, backwards = DryRuns(model, dtype, ready), Backwards(halves) if counts else None

    def walk(copied: nn.Module, x: Value, y: Value) -> list[LayerNumbers]:
        return _walk(copied, x, y, loss, attention, Operators(runs.on_fakes), backwards)

    # If the model refuses its inputs, it does so again on real tensors, with the error that the user knows.
    what = f"A micro-batch of {type(model).__name__}"
    return {
        key: runs.run(walk, cut(inputs if dtype is None else cast(inputs, dtype)), cut(targets), what=what)
        for key, (inputs, targets) in shapes.items()
    }


def of_wide_outputs(loss: Loss) -> Loss:
    """Return the loss with its outputs cast to fp32, whatever the model computes in."""
    return lambda outputs, targets: loss(cast(outputs, torch.float32), targets)


# ---- forward -------------------------------------------------------------------------------------------------


class Operators(Meter):
    """A meter that also doubts dtypes.

    Fake tensors accept dtypes that real ones reject, such as a product of float64 with float32. If an operator is given
    several dtypes that it may not accept together, it raises, so that the real run decides.
    """

    ALIKE = ("linear", "mm", "addmm", "bmm", "baddbmm", "native_layer_norm", "native_group_norm")
    INDEXED = ("nll_loss_forward", "nll_loss2d_forward")

    def __init__(self, on_fakes: bool) -> None:
        super().__init__()
        self.on_fakes = on_fakes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "prim":  # every second call: a query for a fake tensor's device
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if self.on_fakes and name in self.ALIKE:
            if len({value.dtype for value in args if isinstance(value, Tensor)}) > 1:
                raise TypeError(f"{name} of several dtypes")
        elif self.on_fakes and name in self.INDEXED and args[1].dtype != torch.int64:
            raise TypeError(f"{name} of targets {args[1].dtype}")
        return super().__torch_dispatch__(func, types, args, kwargs)


def _walk(
    model: nn.Module, inputs: Value, targets: Value, loss: Loss, attention: Around, operators: Operators,
    backwards: Backwards | None,
) -> list[LayerNumbers]:  # fmt: skip
    """Run layer after layer and then the loss; then the backwards, of which each begins and ends at its own layer."""
    layers = layers_of(model)
    kinds = [kind_of_layer(layer) for _, layer in layers]
    handles = [h for name, block in repeated_blocks(model).items() for h in operators.watch(name, block)]
    numbers: list[LayerNumbers] = []
    calls: list[tuple[Flops, list[Tensor], list[Tensor], Hashable]] = []
    alike: dict[Hashable, tuple[int, Any]] = {}  # by kind, the first such layer, and what it made
    value: Any = inputs
    with torch.enable_grad(), Attentions(operators), attention(), operators:
        for i, (name, layer) in enumerate(layers):
            given, leaves = cut_off(value)
            boundary = Boundary.from_output(given)
            kind = None if i == 0 or boundary is None else (kinds[i], boundary)
            if kind in alike:
                first, value = alike[kind]
                numbers.append(numbers[first])
                calls.append(calls[first])
                continue
            before = _versions(given)
            operators.clear()
            try:
                value = call(layer, given, first=i == 0)
            except Exception as error:
                whole = "data of this shape" if i == 0 else "what its own layers make of data of this shape"
                raise ValueError(
                    f"The model refuses {whole}: layer {i} ({name or 'the model'}, {type(layer).__name__}) was given "
                    f"{_describe(given)} and said: {one_line(error)}"
                ) from None
            if kind is not None and operators.on_fakes:
                alike[kind] = i, value
            calls.append((operators.measured(name), _tensors(value), leaves, kind))
            written = _versions(given) != before
            made = Boundary.from_output(value)
            numbers.append(LayerNumbers(Flops(), made, written))
        given, leaves = cut_off(value)
        operators.clear()
        result = _checked_loss(loss, given, targets)
        calls.append((operators.measured(), [result], leaves, None))
        numbers[-1] = replace(numbers[-1], output=_as_the_loss_uses(value, leaves, result))
        numbers.append(LayerNumbers(Flops(), None))
    for handle in handles:
        handle.remove()
    if backwards is None:
        return numbers
    return [replace(each, flops=backwards.count(*made)) for each, made in zip(numbers, calls, strict=True)]


def _as_the_loss_uses(outputs: Any, leaves: list[Tensor], loss: Tensor) -> Boundary | None:
    """Return the boundary of the model's outputs; those that the loss does not use have no gradient."""
    made, reached = Boundary.from_output(outputs), set(map(id, leaves_of([loss])))
    if made is None:
        return None
    ends = dict.fromkeys(id(each) for each in _tensors(outputs) if each.requires_grad)
    used = {number for number, leaf in zip(ends, leaves, strict=True) if id(leaf) in reached}
    specs = zip(made.specs, _tensors(outputs), strict=True)
    return replace(made, specs=tuple(spec._replace(requires_grad=id(each) in used) for spec, each in specs))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def _versions(value: Any) -> list[int]:
    """Return how often each tensor has been written into."""
    tensors = value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else (value,)
    return [tensor._version for tensor in tensors if isinstance(tensor, Tensor)]


def _checked_loss(loss: Loss, outputs: Any, targets: Value) -> Tensor:
    """Return the loss, a scalar that depends on trained parameters."""
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
    return value


def _describe(value: Any) -> str:
    """Describe a value by its shapes and dtypes, as in "[8, 4] float32"."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_describe(tensor)}" for name, tensor in value.items()) + "}"
    boundary = Boundary.from_output(value)
    return type(value).__name__ if boundary is None else str(boundary)


# ---- backward ------------------------------------------------------------------------------------------------


def cut_off(value: Any) -> tuple[Any, list[Tensor]]:
    """Return a value whose tensors have no graph behind them, and the leaves through which gradients arrive.

    A layer may write into what it is given, but not into leaves, so it is given copies of these.
    """
    tensors, shape = flatten(value)
    leaves: dict[int, Tensor] = {}
    copies: dict[int, Tensor] = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.requires_grad and id(tensor) not in leaves:
            leaves[id(tensor)] = tensor.detach().requires_grad_()
            copies[id(tensor)] = leaves[id(tensor)].clone()
    if not leaves:
        return value, []
    return rebuild(shape, [copies.get(id(each), each) for each in tensors]), list(leaves.values())


class Backwards:
    """Counts the backwards of calls, and of calls that are alike only once.

    `halves` counts the part for the gradients of the inputs by itself, as a split backward computes it.
    """

    def __init__(self, halves: bool) -> None:
        self._halves = halves
        self._known: dict[Hashable, Flops] = {}

    def count(
        self, forward: Flops, made: Sequence[Tensor], inputs: Sequence[Tensor], kind: Hashable = None
    ) -> Flops:
        """Return the cost of a call's forward and backward.

        Args:
            inputs: the tensors through which gradients leave it: leaves (`cut_off`), or ones with a graph behind them.
            kind: equal for calls that are alike; None: there are no others.
        """
        known = self._known.get(kind) if kind is not None else None
        if known is None:
            try:
                known = self._backward([each for each in dict.fromkeys(made) if each.requires_grad], inputs)
            except Exception as error:
                reason = (str(error).strip().splitlines() or [""])[0]
                known = Flops(why=f"{type(error).__name__}: {reason}")
            self._known[kind] = known
        if known.why:
            return known
        return replace(
            forward, backward=known.backward, backward_bytes=known.backward_bytes,
            input_grad=known.input_grad, input_grad_bytes=known.input_grad_bytes,
        )  # fmt: skip

    def _backward(self, outputs: list[Tensor], inputs: Sequence[Tensor]) -> Flops:
        if not outputs:
            return Flops()
        ones = [torch.ones_like(output) for output in outputs]
        alone = all(each.is_leaf for each in inputs)
        with Meter() as both:
            ends = leaves_of(outputs) if alone else inputs
            torch.autograd.grad(outputs, ends, ones, retain_graph=True, allow_unused=True)
        with Meter() as first:
            if self._halves and alone:
                input_grads(outputs, ones, inputs)
            elif self._halves:
                values = [each for each in inputs if not each.is_leaf]
                torch.autograd.grad(outputs, values, ones, retain_graph=True, allow_unused=True)
        return Flops(
            backward=both.flops, backward_bytes=both.nbytes,
            input_grad=first.flops, input_grad_bytes=first.nbytes,
        )  # fmt: skip


OF_MODULES = frozenset(vars(nn.Module()))  # the attributes that every module has


def kind_of_layer(layer: nn.Module) -> Hashable:
    """Return a key that is equal for layers that compute the same, apart from the content of their tensors.

    It has the classes and plain settings of all modules within, and the shapes of their tensors. Any other object that
    a module holds makes it unique.

    >>> kind_of_layer(nn.Linear(2, 3)) == kind_of_layer(nn.Linear(2, 3))
    True
    >>> kind_of_layer(nn.Dropout(0.1)) == kind_of_layer(nn.Dropout(0.2))
    False
    """
    parts: list[Hashable] = []
    for name, module in layer.named_modules():
        attributes = [(key, value) for key, value in sorted(vars(module).items()) if key not in OF_MODULES]
        settings = tuple((key, value if _is_plain(value) else id(value)) for key, value in attributes)
        hooks = tuple(id(hook) for hooks in map(vars(module).get, HOOKS) if hooks for hook in hooks.values())
        tensors = tuple(
            (key, None if value is None else (tuple(value.shape), value.dtype, value.requires_grad))
            for key, value in (*module._parameters.items(), *module._buffers.items())
        )
        parts.append((name, type(module), module.training, settings, hooks, tensors))
    return tuple(parts)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
