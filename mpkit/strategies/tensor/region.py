"""A running region: f at its entry, its layers on local weights, g at its exit.

    entry     a hook before the entry module: x goes through f (f_bar if the sequence is divided), and the rank's
              own random numbers begin
    column    y_i = x W_i^T + b_i, with this rank's outputs only
    row       z = sum over ranks of y_i V_i^T, by g (or g_bar); the bias is added once, after it; then the random
              numbers that all ranks share continue

Y = GeLU(X A), Z = Y B with A = [A_1, A_2] divided by columns and B by rows gives Z = Y_1 B_1 + Y_2 B_2, where
Y_i = GeLU(X A_i) needs no communication: one sum per region in the forward, and one in the backward. Weights are here
as in torch, [outputs, inputs], so a layer is x W^T.

Source: Shoeybi et al. 2019, section 3. The modules stay the same objects: only `forward` of the linear layers is
replaced, on the instance.

Sequence parallelism: layer norms, dropouts and residuals between regions work on each token by itself, and under tensor
parallelism alone all ranks would repeat the same work there. So each rank works on its part of the sequence:

    first module    its input is scattered: each rank takes s/t tokens
    regions         f_bar gathers the sequence, g_bar scatters the sums
    random numbers  each rank draws for its own tokens, and all draw the same ones for what all tokens share
    last module     its output is gathered

The parameters there get gradients from a part of the tokens on each rank, which are summed over the ranks.
`mpkit.strategies.reference.tensor.sequence_parallel` is the algorithm. This module adds any model, and dropout.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023, section 4.2.2.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from mpkit.plan.tensor_plan import Region
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.models.own_draws import ForwardSpan, OwnDraws
from mpkit.strategies.models.randomness import may_draw
from mpkit.strategies.partition.value import Value
from mpkit.strategies.tensor.operators import Exchange, f, f_bar, g, g_bar, gather, join_sequence, scatter
from mpkit.strategies.tensor.overlap import RegionInput

Finish = Callable[[Tensor], Tensor]  # applied to a column layer's output on this rank


def is_across(layer: nn.Module) -> bool:
    """Return whether a layer is transformers' Conv1D: a linear layer with its weight [inputs, outputs]."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def is_linear(layer: nn.Module) -> bool:
    """Return whether a layer computes x W^T + b when called; nn.MultiheadAttention never calls its `out_proj`."""
    if isinstance(layer, nn.Linear) and not isinstance(layer, NonDynamicallyQuantizableLinear):
        return type(layer).forward is nn.Linear.forward or type(layer).__name__ == "FalconLinear"
    return is_across(layer)


def is_weight(layer: object) -> bool:
    """Return whether this is a parameter [..., outputs, inputs], which its own module multiplies with."""
    return isinstance(layer, nn.Parameter) and layer.dim() > 1


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any]:
    """Return name ("" if by position) and value of a module's first argument, or of transformers' hidden_states."""
    key = "" if args else "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs), "")
    return key, args[0] if args else kwargs.get(key)


def with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], key: str, x: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with another first one."""
    return (args, kwargs | {key: x}) if key else ((x, *args[1:]), kwargs)


class RegionAtWork:
    """One region on one rank, whose modules hold its local weights already.

    Args:
        name: name of the entry, the module before which f is applied.
        columns: the column layers, each with a function of its output.
        sequence: whether x is divided by sequence.
        overlap: whether the backward sums dx while it computes dW; otherwise layers are plain ones.
        region: the plan's region; None for the head.
    """

    def __init__(
        self, group: Communicator, name: str, entry: nn.Module, columns: dict[nn.Module, Finish | None],
        row: nn.Module | None, draws: OwnDraws,
        *, sequence: bool, overlap: bool, region: Region | None = None,
    ) -> None:  # fmt: skip
        self._group, self._columns, self._sequence, self._region = group, columns, sequence, region
        has_one_input = region is None or not region.inputs
        self._overlap = overlap and bool(columns) and has_one_input
        self._draws, self._name = draws, f"{name} on {group.index}"
        self._has_row = region is not None and region.row is not None
        self._of_rows = self._has_row and row is None  # experts, which take rows of tokens
        if region is not None and region.row is not None:
            draws.spans.append(ForwardSpan(self._name, name, name if row is None else region.row))
        self._entered: RegionInput | None = None
        entry.register_forward_pre_hook(self._enter, with_kwargs=True)
        for layer in columns:
            layer.forward = partial(self._column, layer)
        if row is not None:
            row.forward = partial(self._row, row)
        elif self._has_row:  # a parameter
            entry.register_forward_hook(self._leave)

    # ---- entry

    def _enter(self, entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass x, and the region's further inputs, through f."""
        if self._has_row:
            args, kwargs = self._further(entry, args, kwargs)
        key, x = first_argument(args, kwargs)
        return with_first(args, kwargs, key, self._begin_region(entry, x)) if isinstance(x, Tensor) else None

    def _further(
        self, entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass the arguments after x that column layers use through f; reject others that have a gradient."""
        region = self._region
        assert region is not None
        names = list(inspect.signature(type(entry).forward).parameters)[1:]
        known = {*region.apart, first_argument(args, kwargs)[0]}
        given = [*zip(names[1:], args[1:], strict=False), *kwargs.items()]
        entered: dict[str, Any] = {}
        for name, value in given:
            if name in region.inputs and isinstance(value, Tensor):
                entered[name] = self._apply(f, f_bar, value)
            elif name not in known and _has_gradient(value):
                raise ValueError(
                    f"Region(entry={region.entry!r}): its argument {name} has a gradient too, of which each rank would "
                    f"compute a part: inputs=({name!r},) where it is an input of column layers, apart=({name!r},) "
                    "where it is used after the row layer only, or has this rank's heads already"
                )
            elif self._sequence and self._of_rows and isinstance(value, Tensor):  # each token's experts
                entered[name] = join_sequence(self._group, value[None])[0]
        further = tuple(entered.pop(name, value) for name, value in zip(names[1:], args[1:], strict=False))
        return (*args[:1], *further, *args[1 + len(further) :]), kwargs | entered

    def _leave(self, entry: nn.Module, args: Any, y: Tensor) -> Tensor:
        """Sum the entry's output, which is a partial sum, over the ranks."""
        z = self._apply(g, g_bar, y)
        self._draws.end(self._name)
        return z

    def _apply(self, plain: Exchange, by_sequence: Exchange, x: Tensor) -> Tensor:
        """Apply f or g, or f_bar or g_bar if the sequence is divided, to [b, s, h], or to rows of tokens, [T, h]."""
        if not self._sequence:
            return plain(self._group, x)
        return by_sequence(self._group, x[None])[0] if self._of_rows else by_sequence(self._group, x)

    def _begin_region(self, entry: nn.Module, x: Tensor) -> Tensor:
        self._entered = None
        if entry.training and self._has_row:
            self._draws.begin(self._name, x.device)
        # The column layers of a `Value` may be in another stage, which would then share their weights with this one.
        # The forward of a recomputed entry runs again without this hook.
        is_recomputed = "forward" in vars(entry) and entry not in self._columns
        overlap = self._overlap and type(x) is not Value and not is_recomputed
        wanted = x.requires_grad or any(layer.weight.requires_grad for layer in self._columns)
        inside = self._apply(f, f_bar, x)
        # Under autocast a layer computes in another precision than that of its weights.
        if overlap and wanted and torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type):
            layers = {layer: is_across(layer) for layer in self._columns}
            self._entered = RegionInput(self._group, x, inside, layers, sequence=self._sequence)
        return inside

    # ---- column

    def _column(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Apply a column layer: [..., inputs] -> [..., this rank's outputs]."""
        entered, y = self._entered, None
        if entered is not None and x is entered.inside:
            y = entered.take(layer)
            if not entered.left:
                self._entered = None  # and with it x, of the whole sequence
        y, finish = _product(layer, x, layer.bias) if y is None else y, self._columns[layer]
        return y if finish is None else finish(y)

    # ---- row

    def _row(self, layer: nn.Module, y: Tensor) -> Tensor:
        """Apply the row layer: [..., this rank's inputs] -> [..., outputs]."""
        z = self._leave(layer, None, _product(layer, y, None))
        bias: Any = layer.bias
        return z if bias is None else z + bias


def _has_gradient(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_gradient, value))
    return isinstance(value, Tensor) and value.requires_grad


def _product(layer: nn.Module, x: Tensor, bias: Any) -> Tensor:
    weight: Any = layer.weight
    return F.linear(x, weight.t() if is_across(layer) else weight, bias)


CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def modules_between(model: nn.Module, first: str, last: str) -> set[str]:
    """Return the names of the modules from the first to the last, with those within each."""
    names = [name for name, _ in model.named_modules()]
    if names.index(last) < names.index(first):
        raise ValueError(
            f"TensorPlan(sequence=({first!r}, {last!r})): the model has {last!r} before {first!r}. The first is where "
            "the sequence is scattered, the last where it is gathered"
        )
    end = max(i for i, name in enumerate(names) if name == last or name.startswith(f"{last}."))
    return set(names[names.index(first) : end + 1])


def divide_sequence(model: nn.Module, group: Communicator, draws: OwnDraws, first: str, last: str) -> None:
    """Scatter the sequence before the first module, gather it after the last, and draw for own tokens in between."""
    modules = dict(model.named_modules())
    name = f"sequence on {group.index}"
    draws.spans.insert(0, ForwardSpan(name, first, last))  # regions are inside

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key, x = first_argument(args, kwargs)
        x = scatter(group, x)
        if module.training:
            draws.begin(name, x.device)
        return with_first(args, kwargs, key, x)

    def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = first_argument(args, kwargs)[1]
        if isinstance(x, Tensor) and x.dim() > 1:
            draws.tokens[name] = tuple(x.shape[:2])

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        draws.end(name)
        if isinstance(output, Tensor):
            return gather(group, output)
        return (gather(group, output[0]), *output[1:])

    for inner in _outermost(modules_between(model, first, last), modules):
        modules[inner].register_forward_pre_hook(see, with_kwargs=True, prepend=True)
    modules[first].register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    modules[last].register_forward_hook(leave)


def _outermost(names: set[str], modules: dict[str, nn.Module]) -> Iterator[str]:
    """Yield the outermost modules that may draw, inside of containers."""
    for name in names:
        parent = name.rpartition(".")[0]
        while parent and (parent not in names or isinstance(modules[parent], CONTAINERS)):
            parent = parent.rpartition(".")[0]
        if not parent and may_draw(modules[name]) and not isinstance(modules[name], CONTAINERS):
            yield name
