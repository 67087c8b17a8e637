"""The optimizer for what one rank updates, with the parameter groups that the whole model's optimizer would have.

    whole     the user's function is called with every trained parameter of the model, in the model's order
    held      a parameter that this rank updates whole is passed itself; one that it updates in part, or not at all,
              stands in for itself: the same object and attributes, in its whole shape, without memory
    divide    stand-ins leave the groups; a part replaces its stand-in, with its part of an initial state

So groups by index, number, shape, name, attribute or identity are the same as in serial training, whatever the plan
gives this rank. A function that looks at values is rejected before (`mpkit.strategies.prepare.optimizer`).

A function may return several optimizers: Muon for the matrices and AdamW for the rest. They are one, as in torchtitan's
OptimizersContainer: each steps in its own way, and learning rates, checkpoints and sharding see one optimizer.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.common.torch_private import DisableTorchFunctionSubclass
from mpkit.common.tracebacks import public
from mpkit.strategies.stage.shard import HeldPart
from mpkit.strategies.update.learning_rate import linear_scaling, sqrt_scaling

__all__ = [
    "AVERAGE",
    "OptimizerFunction",
    "SeveralOptimizers",
    "UpdatedPart",
    "WholeParameter",
    "by_name",
    "describe_optimizer",
    "elementwise",
    "empty_whole",
    "free",
    "kind_of",
    "linear_scaling",
    "make_like",
    "make_optimizer",
    "parts_of",
    "sqrt_scaling",
    "stand_in",
    "trained_parameters",
    "with_average",
]


class WholeParameter(NamedTuple):
    """A trained parameter of the model, before it is divided among ranks.

    Attributes:
        attributes: those that its author gave it, such as a mark.
        original: the model's own object, on a rank.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: type[nn.Parameter] = nn.Parameter
    attributes: Mapping[str, Any] = MappingProxyType({})
    original: nn.Parameter | None = None


def trained_parameters(
    model: nn.Module, *, here: bool = False
) -> tuple[list[WholeParameter], dict[str, str]]:
    """Return a model's trained parameters in its order, and a parameter's first name for each of its names.

    >>> layer = nn.Linear(3, 2, bias=False)
    >>> whole, first = trained_parameters(nn.Sequential(layer, layer))
    >>> [each[:3] for each in whole], first
    ([('0.weight', (2, 3), torch.float32)], {'0.weight': '0.weight', '1.weight': '0.weight'})
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    whole = [_whole(n, p, here=here) for n, p in model.named_parameters() if p.requires_grad]
    return whole, {name: first[id(parameter)] for name, parameter in every}


def _whole(name: str, parameter: nn.Parameter, *, here: bool) -> WholeParameter:
    whole = WholeParameter(name, tuple(parameter.shape), parameter.dtype)
    if not issubclass(type(parameter), nn.Parameter):  # a fake tensor, whose attributes are torch's
        return whole
    original = parameter if here and type(parameter.data) is Tensor else None
    return whole._replace(kind=type(parameter), attributes=dict(vars(parameter)), original=original)


def free(whole: Sequence[WholeParameter], used: Collection[nn.Parameter]) -> None:
    """Free the memory of originals that this rank does not compute with, though a user's function may keep them."""
    for each in whole:
        if each.original is not None and each.original not in used:
            each.original.data = empty_whole(each, each.original.device)


def stand_in(whole: WholeParameter, device: torch.device | None = None) -> nn.Parameter:
    """Return a parameter of the whole shape that takes no memory: all its elements are the same zero."""
    return make_like(whole, empty_whole(whole, device))


def make_like(whole: WholeParameter, data: Tensor) -> nn.Parameter:
    """Return a parameter that looks as the model's does, but for its values."""
    plain = nn.Parameter(data)
    parameter = plain if whole.kind is nn.Parameter else Tensor._make_subclass(whole.kind, data, True)
    vars(parameter).update(whole.attributes)
    return parameter


def empty_whole(whole: WholeParameter, device: torch.device | None) -> Tensor:
    """Return zeros of the whole shape that take no memory."""
    return torch.zeros((), dtype=whole.dtype, device=device).expand(whole.shape)


class UpdatedPart(NamedTuple):
    """The part of a parameter that one rank updates.

    Attributes:
        part: where it lies in the whole parameter; None if `parameter` is the whole one.
    """

    parameter: nn.Parameter
    part: HeldPart | None = None


@dataclass(frozen=True)
class OptimizerFunction:
    """A function that makes an optimizer, and what its author declared about it.

    Attributes:
        function: takes parameters, or (name, parameter) pairs.
        elementwise: whether the optimizer is declared to treat each element by itself.
    """

    function: Callable[[Any], Any]
    by_name: bool = False
    elementwise: bool = False

    def __call__(self, parameters: Any) -> Any:
        """Make an optimizer by calling the function; a list of optimizers becomes one."""
        made = self.function(parameters)
        several = isinstance(made, (list, tuple)) and bool(made)
        if several and all(isinstance(each, torch.optim.Optimizer) for each in made):
            return SeveralOptimizers(made)
        return made

    def make_optimizer(self, named: Mapping[str, nn.Parameter]) -> Any:
        """Make an optimizer for named parameters."""
        return self(list(named.items()) if self.by_name else list(named.values()))


def describe_optimizer(function: Callable[[Any], Any]) -> OptimizerFunction:
    """Return the function with what is known about it.

    >>> describe_optimizer(lambda params: None).by_name, describe_optimizer(lambda named_parameters: None).by_name
    (False, True)
    """
    if isinstance(function, OptimizerFunction):
        return function
    try:
        first = next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):  # callables without a signature
        first = ""
    return OptimizerFunction(function, by_name=first == "named_parameters")


@public
def by_name(function: Callable[[Any], torch.optim.Optimizer]) -> OptimizerFunction:
    """Let an optimizer function take (name, parameter) pairs, as `model.named_parameters()` yields them.

    A function whose first parameter is called `named_parameters` receives them without this.

    >>> import mpkit as mk
    >>> @mk.optimizer.by_name
    ... def optimizer(named):
    ...     decays = [p for name, p in named if not name.endswith("bias")]
    ...     rest = [p for name, p in named if name.endswith("bias")]
    ...     return torch.optim.AdamW([{"params": decays}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)
    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> [len(group["params"]) for group in optimizer(list(model.named_parameters())).param_groups]
    [1, 1]

    Args:
        function: function(pairs) -> torch.optim.Optimizer; `pairs` is a list.
    """
    return replace(describe_optimizer(function), by_name=True)


@public
def elementwise(function: Callable[[Any], torch.optim.Optimizer]) -> OptimizerFunction:
    """Declare that an optimizer changes each element by that element's own gradient and state alone.

    ZeRO-2 and -3, tensor and expert parallelism give a rank parts of each parameter. PyTorch's own elementwise
    optimizers are known to suit; any other is refused there unless it is declared, and under ZeRO-1 has each parameter
    whole, on one rank. The run's proof compares the weights of one that is declared, too.

    Args:
        function: optimizer(params) -> torch.optim.Optimizer.

    >>> import mpkit as mk
    >>> optimizer = mk.optimizer.elementwise(lambda params: torch.optim.AdamW(params, lr=1e-3))
    """
    return replace(describe_optimizer(function), elementwise=True)


def make_optimizer(
    function: Callable[[Any], Any], whole: Sequence[WholeParameter], held: Mapping[str, UpdatedPart]
) -> torch.optim.Optimizer | None:
    """Make the optimizer for what one rank updates.

    Args:
        function: makes the optimizer, as for `Cluster.train`.
        held: what this rank updates, by name; some of it may have no elements.

    Returns:
        The optimizer, or None if it has nothing to update.
    """
    some = next((each.parameter for each in held.values() if each.parameter.numel()), None)
    if some is None:
        return None
    # ---- whole, held
    given = {each.name: _stand_in_for(each, held.get(each.name), some.device) for each in whole}
    with _standing_in(whole, held, some.device):
        optimizer: torch.optim.Optimizer = describe_optimizer(function).make_optimizer(given)
    # ---- divide
    parts = {
        id(p): held.get(name)
        for name, p in given.items()
        if name not in held or p is not held[name].parameter
    }
    for key, state in list(optimizer.state.items()):  # initial states, such as Adagrad's
        if id(key) in parts:
            del optimizer.state[key]
            part = parts[id(key)]
            if part is not None:
                optimizer.state[part.parameter] = {n: _part(v, part, key.shape) for n, v in state.items()}
    for group in optimizer.param_groups if parts else ():
        _divide(group, parts)
    if any(not group["params"] for group in optimizer.param_groups):
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return optimizer if optimizer.param_groups else None


def _stand_in_for(whole: WholeParameter, held: UpdatedPart | None, device: torch.device) -> nn.Parameter:
    """Return what the user's function is given for a parameter."""
    if whole.original is not None:
        return whole.original
    return stand_in(whole, device) if held is None or held.part is not None else held.parameter


@contextmanager
def _standing_in(
    whole: Sequence[WholeParameter], held: Mapping[str, UpdatedPart], device: torch.device
) -> Iterator[None]:
    """Give originals the values that this rank updates whole, inside the block; others have their shape without memory.

    After it they have what they had.
    """
    originals = [(each.original, each) for each in whole if each.original is not None]
    with DisableTorchFunctionSubclass():  # a sharded parameter refuses to be looked at
        before = [(parameter, parameter.data) for parameter, _ in originals]
        kinds = [type(parameter) for parameter, _ in originals]
        for parameter, each in originals:
            part = held.get(each.name)
            if part is not None and part.part is None:
                parameter.data = part.parameter.data
            else:
                parameter.data = empty_whole(each, device)
            parameter.__class__ = each.kind
    try:
        yield
    finally:
        with DisableTorchFunctionSubclass():
            for (parameter, data), kind in zip(before, kinds, strict=True):
                parameter.data, parameter.__class__ = data, kind


def _divide(group: dict[str, Any], parts: Mapping[int, UpdatedPart | None]) -> None:
    """Keep in a group only what is held, in place, since an optimizer may have kept its lists."""
    kept = []
    for i, parameter in enumerate(group["params"]):
        part = parts.get(id(parameter)) if id(parameter) in parts else UpdatedPart(parameter)
        if part is not None and part.parameter.numel():
            kept.append((i, part.parameter))
    if "param_names" in group:
        group["param_names"][:] = [group["param_names"][i] for i, _ in kept]
    group["params"][:] = [parameter for _, parameter in kept]


def _part(value: Any, part: UpdatedPart, shape: torch.Size) -> Any:
    """Return this rank's slice of an initial state that has the full parameter's shape; keep others."""
    if part.part is None or not isinstance(value, Tensor) or value.shape != shape or not value.dim():
        return value
    return part.part.take(value).view(part.parameter.shape).clone()


class SeveralOptimizers(Optimizer):
    """Optimizers that step one after the other; no parameter belongs to two of them.

    >>> import torch
    >>> w, b = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    >>> both = SeveralOptimizers([torch.optim.SGD([w], lr=0.1), torch.optim.AdamW([b])])
    >>> kind_of(both), [group["lr"] for group in both.param_groups]
    ('SGD with AdamW', [0.1, 0.001])

    Raises:
        ValueError: a parameter belongs to two of them.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([group for each in self.optimizers for group in each.param_groups], {})
        shared: defaultdict[Any, Any] = defaultdict(dict)
        for each in self.optimizers:
            shared |= each.state
            each.state = shared
        self.state = shared

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Let each optimizer step that has parameters here."""
        for each in self.optimizers:
            each.param_groups[:] = [group for group in each.param_groups if group["params"]]
            if each.param_groups:
                each.step()


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that an optimizer consists of: itself, if it is not several."""
    return optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else [optimizer]


def kind_of(optimizer: Optimizer) -> str:
    """Return an optimizer's class in words."""
    return " with ".join(type(each).__name__ for each in parts_of(optimizer))


# ---- the moving average of the weights -------------------------------------------------------------------------


AVERAGE = "ema"
"""The name of the average among an optimizer's states."""


class Average:
    """A hook after an optimizer's step: the exponential moving average of the weights, one more state of it.

        average <- decay * average + (1 - decay) * weight        after each step; after the first one, average = weight

    which is what torch.optim.swa_utils.AveragedModel computes with `get_ema_multi_avg_fn(decay)`. As a state it is
    divided like the weights, in fp32 where the optimizer works on fp32 copies, and checkpoints save it and divide it
    anew. Buffers are not averaged.

    Source: Polyak and Juditsky 1992; with exponential weights, Tarvainen and Valpola, "Mean teachers", 2017, section 2.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, _args: Any = None, _kwargs: Any = None) -> None:
        """Update the averages of all that the optimizer updates."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None and AVERAGE not in optimizer.state.get(parameter, {}):
                    continue  # it has not changed, and some optimizers take any state for all of theirs
                state = optimizer.state[parameter]
                if AVERAGE in state:
                    state[AVERAGE].lerp_(parameter, 1.0 - self._decay)
                else:
                    state[AVERAGE] = parameter.detach().clone()


def with_average(function: Callable[[Any], Any], decay: float) -> OptimizerFunction:
    """Return a function that makes the same optimizer, which also averages the weights."""
    made = describe_optimizer(function)

    def make(parameters: Any) -> Any:
        optimizer = made(parameters)
        if isinstance(optimizer, Optimizer):
            optimizer.register_step_post_hook(Average(decay))
        return optimizer

    return replace(made, function=make)
