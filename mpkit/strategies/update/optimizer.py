"""The optimizer for what one rank updates, with the parameter groups that the whole model's optimizer would have.

    whole     the user's function receives every trained parameter of the model, in the model's order
    held      a parameter that this rank updates whole is itself; one that it updates in part, or not at all, stands in
              for itself: the same object and attributes, in its whole shape, without memory
    divide    stand-ins leave the groups; a part replaces its stand-in, with its part of an initial state

So groups by index, number, shape, name, attribute or identity are those of serial training under any plan.
`mpkit.strategies.prepare.optimizer` has rejected functions that look at values.

A function may return several optimizers: Muon for the matrices and AdamW for the rest. As in torchtitan's
OptimizersContainer, each steps in its own way, and learning rates, checkpoints and sharding see one optimizer.
"""

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

__all__ = ["by_name", "elementwise", "linear_scaling", "sqrt_scaling"]


class WholeParameter(NamedTuple):
    """A trained parameter of the model, before it is divided among ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: type[nn.Parameter] = nn.Parameter
    attributes: Mapping[str, Any] = MappingProxyType({})  # set by its author, such as a mark
    original: nn.Parameter | None = None  # on a rank: the model's own object


def trained_parameters(
    model: nn.Module, *, here: bool = False
) -> tuple[list[WholeParameter], dict[str, str]]:
    """Return a model's trained parameters in its order, and the first name of the parameter for every name.

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
    """Free the memory of originals that this rank does not compute with; a user's function may keep the objects."""
    for each in whole:
        if each.original is not None and each.original not in used:
            each.original.data = empty_whole(each, each.original.device)


def stand_in(whole: WholeParameter, device: torch.device | None = None) -> nn.Parameter:
    """Return a parameter of the whole shape that takes no memory."""
    return make_like(whole, empty_whole(whole, device))


def make_like(whole: WholeParameter, data: Tensor) -> nn.Parameter:
    """Return a parameter with this data that otherwise looks like the model's."""
    plain = nn.Parameter(data)
    parameter = plain if whole.kind is nn.Parameter else Tensor._make_subclass(whole.kind, data, True)
    vars(parameter).update(whole.attributes)
    return parameter


def empty_whole(whole: WholeParameter, device: torch.device | None) -> Tensor:
    """Return zeros of the whole shape that take no memory: all elements are one."""
    return torch.zeros((), dtype=whole.dtype, device=device).expand(whole.shape)


class UpdatedPart(NamedTuple):
    """The part of a parameter that one rank updates."""

    parameter: nn.Parameter
    part: HeldPart | None = None  # where it lies in the whole parameter; None if `parameter` is the whole one


@dataclass(frozen=True)
class OptimizerFunction:
    """A function that makes an optimizer, and what its author declared about it."""

    function: Callable[[Any], Any]
    by_name: bool = False  # it takes (name, parameter) pairs
    elementwise: bool = False  # declared: the optimizer treats each element by itself

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
    """Return the function with its declarations.

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
    """Make the optimizer for the parts that one rank updates, by name; None if they have no elements."""
    some = next((each.parameter for each in held.values() if each.parameter.numel()), None)
    if some is None:
        return None
    # ---- whole, held
    given = {each.name: _stand_in_for(each, held.get(each.name), some.device) for each in whole}
    with _standing_in(whole, held, some.device):
        optimizer: torch.optim.Optimizer = describe_optimizer(function).make_optimizer(given)
    # ---- divide
    replaced = (name for name, p in given.items() if name not in held or p is not held[name].parameter)
    parts = {id(given[name]): held.get(name) for name in replaced}
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
    """Return what the user's function receives for a parameter."""
    if whole.original is not None:
        return whole.original
    return stand_in(whole, device) if held is None or held.part is not None else held.parameter


@contextmanager
def _standing_in(
    whole: Sequence[WholeParameter], held: Mapping[str, UpdatedPart], device: torch.device
) -> Iterator[None]:
    """Inside the block, give originals the values that this rank updates whole, and the others' shapes no memory."""
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
    """Reduce a group to this rank's parts; in place, since an optimizer may have kept its lists."""
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
        """Step each optimizer that has parameters here."""
        for each in self.optimizers:
            each.param_groups[:] = [group for group in each.param_groups if group["params"]]
            if each.param_groups:
                each.step()


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that an optimizer consists of, which may be itself alone."""
    return optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else [optimizer]


def kind_of(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class, or those of several."""
    return " with ".join(type(each).__name__ for each in parts_of(optimizer))


AVERAGE = "ema"
"""The name of the average among an optimizer's states."""


class Average:
    """A hook after an optimizer's step: the exponential moving average of the weights, as one more of its states.

        average <- decay * average + (1 - decay) * weight        after each step; after the first one, average = weight

    torch.optim.swa_utils.AveragedModel computes the same with `get_ema_multi_avg_fn(decay)`. As a state, the average is
    divided and saved like the weights, in fp32 where the optimizer works on fp32 copies. Buffers are not averaged.

    Source: Polyak and Juditsky 1992; with exponential weights, Tarvainen and Valpola, "Mean teachers", 2017, section 2.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, _args: Any = None, _kwargs: Any = None) -> None:
        """Update the averages of the optimizer's parameters."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None and AVERAGE not in optimizer.state.get(parameter, {}):
                    continue  # unchanged; and to some optimizers, any state means that all of theirs is there
                state = optimizer.state[parameter]
                if AVERAGE in state:
                    state[AVERAGE].lerp_(parameter, 1.0 - self._decay)
                else:
                    state[AVERAGE] = parameter.detach().clone()


def with_average(function: Callable[[Any], Any], decay: float) -> OptimizerFunction:
    """Return a function that makes the same optimizer, with a moving average of the weights."""
    made = describe_optimizer(function)

    def make(parameters: Any) -> Any:
        optimizer = made(parameters)
        if isinstance(optimizer, Optimizer):
            optimizer.register_step_post_hook(Average(decay))
        return optimizer

    return replace(made, function=make)
