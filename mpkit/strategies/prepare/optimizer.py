"""The optimizer, before any rank starts: it is made once, on stand-ins, and its kind decides what ranks may give it.

    made         by the user's function, from parameters that take no memory; a rejection says what would work
    divided      ZeRO-2 and -3, tensor and expert parallelism give a rank some elements of a parameter: right only for
                 elementwise optimizers, PyTorch's own or declared ones (`mk.optimizer.elementwise`)
    grouped      parameters have the options that they have in a loop with the model's own parameters
    by owner     ZeRO-1 gives any other optimizer each parameter whole, on one rank
    kept         for checkpoints, two steps on small numbers show its states, and what it keeps elsewhere

Nothing else is tried. The run's proof compares in each weight whatever an optimizer does by values, places or chance.
"""

import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim

from mpkit.common.exceptions import one_line, report
from mpkit.common.torch_private import (
    FakeTensor,
    _disable_current_modes,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)
from mpkit.plan.plan import Plan
from mpkit.strategies.models.hooks import hook_name, hooks_on
from mpkit.strategies.models.python_state import PythonState
from mpkit.strategies.packing.packing import Packer
from mpkit.strategies.prepare.arguments import ADAM, a_kind_of
from mpkit.strategies.prepare.isolation import quiet
from mpkit.strategies.update.optimizer import (
    Average,
    OptimizerFunction,
    SeveralOptimizers,
    UpdatedPart,
    WholeParameter,
    describe_optimizer,
    kind_of,
    make_like,
    make_optimizer,
    parts_of,
    stand_in,
    trained_parameters,
)

ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adagrad,
    optim.Adadelta, optim.ASGD, optim.Rprop,
)  # fmt: skip
"""PyTorch's optimizers that are elementwise according to the formulas in its documentation."""

ENOUGH = 2**17
"""Elements of the largest model whose optimizer takes its step in the model's own shapes."""


class OptimizerTraits(NamedTuple):
    """What is known about an optimizer before the ranks start."""

    kind: str = ""  # the name of its class
    states: tuple[str, ...] = ()  # their names; empty if no checkpoint needs them
    whole: bool = False  # ZeRO-1 gives each parameter whole to one rank: an element may depend on the others


def examine_optimizer(
    optimizer: Any, model: nn.Module, given: nn.Module, plan: Plan, *, scheduled: bool, saves: bool
) -> OptimizerTraits:
    """Examine a training's optimizer; raise a ValueError if ranks cannot make it, or checkpoints would be incomplete.

    `model` is the model as it is sent to the ranks, `given` the same as the user has it.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise ValueError(
            f"optimizer is an optimizer already, {kind}, and holds the parameters of your copy of the model. Each rank "
            f"makes its own, for its part: optimizer=lambda params: torch.optim.{kind}(params, lr="
            f"{optimizer.param_groups[0].get('lr', 1e-3)})"
        )
    if not callable(optimizer):
        raise ValueError(f"optimizer is {a_kind_of(optimizer)}; it is a function of parameters: {ADAM}")
    _check_global_hooks()
    # Numbers are needed here, even where a rank is simulated without them.
    with quiet(), _disable_current_modes():
        whole, _ = trained_parameters(model)
        if not whole:
            return OptimizerTraits()
        params = {each.name: stand_in(each) for each in whole}
        made = _make(_as_sent(optimizer, model, params), params)
        # In a single backward on one rank a hook on a parameter sees its whole gradient.
        _check_made(made, params, scheduled=scheduled, once=plan.ranks == plan.microbatches == 1)
        _check_grouped(optimizer, given, made, params)
        function = describe_optimizer(optimizer)
        alone = is_elementwise(made) or function.elementwise
        if not alone and (plan.zero > 1 or plan.tp > 1 or plan.ep > 1):
            raise _not_known(made, plan)
        traits = OptimizerTraits(kind_of(made), whole=plan.zero == 1 and not alone)
        if not saves:
            return traits
        states, elsewhere = _step_twice(function, whole)
    if elsewhere:
        raise ValueError(
            f"optimizer: {traits.kind} changes {elsewhere} from step to step, and a checkpoint has the state of each "
            "parameter (optimizer.state[parameter]) and nothing else: what goes on from it would differ. What works: "
            "no checkpoint_every, checkpoint_dir and resume_from; or an optimizer that keeps its counts there, such as "
            "torch.optim.AdamW"
        )
    return traits._replace(states=states)


def is_elementwise(made: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known to be elementwise: one of PyTorch's own, unmodified."""
    hooks = [*made._optimizer_step_pre_hooks.values(), *made._optimizer_step_post_hooks.values()]
    if any(not isinstance(hook, Average) for hook in hooks):
        return False
    if isinstance(made, SeveralOptimizers):
        return all(map(is_elementwise, made.optimizers))
    return type(made) in ELEMENTWISE and "step" not in vars(made)


def _not_known(made: torch.optim.Optimizer, plan: Plan) -> ValueError:
    kind = kind_of(made)
    who = (
        "ZeRO gives each rank a part of a parameter's elements, in one dimension" if plan.zero
        else "expert parallelism gives each rank some of a parameter's experts" if plan.ep > 1
        else "tensor parallelism gives each rank a part of a parameter's rows or columns"
    )  # fmt: skip
    owned = ""
    if plan.tp == plan.ep == 1:
        owned = f"each parameter whole on one rank: {replace(plan, zero=1, offload='none')}; or "
    return ValueError(
        f"optimizer: {kind} with {plan}: {who}, and {kind} is not known to change each element by that element's own "
        "gradient and state alone. If it does, say so: optimizer=mk.optimizer.elementwise(the function). If it does "
        f"not: an optimizer of PyTorch's that does, {ADAM}; or {owned}whole parameters on every rank: "
        f"Plan.ddp({plan.ranks})"
    )


# ---- made ----------------------------------------------------------------------------------------------------


def _make(optimizer: Any, params: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    function = describe_optimizer(optimizer)
    given = "named_parameters" if function.by_name else "params"
    try:
        made = function.make_optimizer(params)
    except Exception as error:
        hint = "" if function.by_name else "; mk.optimizer.by_name(function) gives it (name, parameter) pairs"
        raise ValueError(
            f"optimizer({given}) failed for the model's {len(params)} parameters: {one_line(error)}. It is called on "
            f"every rank with a list of all parameters that are trained, in the model's order: {ADAM}{hint}"
        ) from None
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer({given}) gave {a_kind_of(made)}; it gives a torch.optim.Optimizer of the parameters, or a "
            f"list of several: {ADAM}"
        )
    lacking = [name for name in ("param_groups", "state") if not hasattr(made, name)]
    if lacking:
        raise ValueError(
            f"optimizer({given}) gave {type(made).__name__} without {' and '.join(lacking)}, of which ranks make its "
            f"part and checkpoints: its __init__ calls super().__init__(params, defaults), as {ADAM[10:]} does."
        )
    return made


def _check_made(
    made: torch.optim.Optimizer, params: dict[str, nn.Parameter], *, scheduled: bool, once: bool
) -> None:
    kind = kind_of(made)
    if any(isinstance(each, torch.optim.LBFGS) for each in parts_of(made)):
        raise ValueError(
            "optimizer: LBFGS computes the loss anew within its step, which a step split over ranks cannot; "
            f"one that takes a step from the gradients works: {ADAM}"
        )
    given = {id(p) for p in params.values()}
    taken = {id(p) for group in made.param_groups for p in group["params"]}
    if not taken <= given:
        raise ValueError(
            "optimizer(params) made an optimizer of other parameters than those it was called with (of your copy "
            f"of the model, perhaps); it has to use its argument: {ADAM}"
        )
    if scheduled and any("lr" not in group for group in made.param_groups):
        raise ValueError(
            f"lr_schedule with {kind}: a group of it has no 'lr' for the schedule to multiply. Either without "
            f"lr_schedule, or an optimizer with a learning rate: {ADAM}"
        )
    hooks = [] if once else hooks_on(params)
    if hooks:
        raise ValueError(
            f"optimizer(params) registers {hooks[0]}, which would see the "
            "gradients of a rank's micro-batches and not that of the whole batch. What works: Plan.serial(); or an "
            "optimizer whose step does it, to gradients that are complete; max_grad_norm=1.0 clips by norm."
        )


def _check_global_hooks() -> None:
    for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
        for hook in hooks.values():
            if str(getattr(hook, "__module__", "")).startswith("mpkit."):
                continue  # a wrapper's, in a rank
            raise ValueError(
                f"A hook on all optimizers ({hook_name(hook)}, by register_optimizer_step_pre_hook or _post_hook) is "
                "set in this process, and ranks are processes of their own, without it. Register it on the optimizer, "
                "within the optimizer function: made.register_step_pre_hook(hook); and take this one away: "
                "handle.remove()."
            )


class _NameWriter(Packer):
    """Writes names in place of parameters."""

    def __init__(self, file: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(file)
        self._names = names

    def persistent_id(self, obj: Any) -> str | None:
        """Return the name of a parameter; None for anything else."""
        return self._names.get(id(obj))


class _NameReader(pickle.Unpickler):
    """Reads parameters by name."""

    def __init__(self, file: io.BytesIO, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(file)
        self._parameters = parameters

    def persistent_load(self, name: str) -> nn.Parameter:
        """Return the parameter of this name."""
        return self._parameters[name]


def _as_sent(optimizer: Any, model: nn.Module, stand_ins: Mapping[str, nn.Parameter]) -> Any:
    """Return the function as a rank receives it: with stand-ins where it refers to parameters of the model.

    A function that cannot be pickled is returned as it is: the launch says what in it stays in this process.
    """
    file = io.BytesIO()
    names = {id(p): name for name, p in model.named_parameters() if name in stand_ins}
    try:
        _NameWriter(file, names).dump(optimizer)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError):
        return optimizer
    file.seek(0)
    return _NameReader(file, stand_ins).load()


# ---- grouped -------------------------------------------------------------------------------------------------


def _check_grouped(
    optimizer: Any, given: nn.Module, made: torch.optim.Optimizer, stand_ins: Mapping[str, nn.Parameter]
) -> None:
    """Check that parameters have the same options on the ranks as in a loop that gives it the model's own.

    The proof is blind to it: its copy has other ids too, and is given the trained parameters only.
    """
    every = dict(given.named_parameters())
    if any(p.is_meta or isinstance(p.data, FakeTensor) for p in every.values()):
        return  # they have no values that a function could look at
    trained, there = {name: every[name] for name in stand_ins}, _options(made, stand_ins)
    for own in (trained, every) if len(every) > len(trained) else (trained,):
        try:
            with _hooks_as_before(own):
                here = _options(describe_optimizer(optimizer).make_optimizer(own), own)
        except Exception as error:
            which = "all parameters, the frozen ones too" if own is every else "the trained parameters"
            report(
                f"optimizer: given {which}, the function raises {one_line(error)}. The ranks give it stand-ins of the "
                "trained ones; whether its groups are those of a loop is not known."
            )
            return
        name = next((name for name in trained if here.get(name) != there.get(name)), None)
        if name is not None:
            looks = (
                "is given the frozen parameters too there, as model.parameters() has them" if own is every else
                "looks at what a rank's parameters do not have when it is called: values (p.norm()), or id(p), a "
                "number that is another in each process"
            )  # fmt: skip
            raise ValueError(
                f"optimizer: {name} has {_of_group(here, name)} in a loop with the model's own parameters, and "
                f"{_of_group(there, name)} on a rank: the function {looks}. What works: to group by name, "
                "optimizer=mk.optimizer.by_name(lambda named: ...); by shape (p.ndim); by an attribute of the "
                "parameter (p.no_decay = True, hasattr(p, 'no_decay')); or by the parameters themselves (p in chosen)."
            )


def _of_group(options: Mapping[str, Any], name: str) -> str:
    values = options.get(name)
    if values is None:
        return "no group"
    return ", ".join(f"{key}={values[key]}" for key in ("lr", "weight_decay") if key in values) or str(values)


def _options(made: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Return the options of each parameter's group, by the parameter's name."""
    names = {id(p): name for name, p in parameters.items()}
    return {
        names[id(p)]: {k: _plain(v) for k, v in group.items() if k not in ("params", "param_names")}
        for group in made.param_groups
        for p in group["params"]
        if id(p) in names
    }


@contextmanager
def _hooks_as_before(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Take away the hooks that are registered inside the block: the parameters are the user's own."""
    before = {p: [set(hooks or ()) for hooks in _hooks(p)] for p in parameters.values()}
    try:
        yield
    finally:
        for p, known in before.items():
            for hooks, keys in zip(_hooks(p), known, strict=True):
                for key in [key for key in hooks or () if key not in keys]:
                    del hooks[key]


def _hooks(parameter: nn.Parameter) -> list[Any]:
    return [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]


# ---- kept ----------------------------------------------------------------------------------------------------


def _step_twice(function: OptimizerFunction, whole: list[WholeParameter]) -> tuple[tuple[str, ...], str]:
    """Return the names of an optimizer's states after two steps on small numbers, and what else these changed."""
    large = sum(prod(w.shape) for w in whole) > ENOUGH
    small = [w._replace(shape=tuple(min(n, 8) for n in w.shape)) if large else w for w in whole]
    held = {w.name: UpdatedPart(make_like(w, torch.full(w.shape, 0.5, dtype=w.dtype))) for w in small}
    made = make_optimizer(function, small, held)
    assert made is not None, "something is trained"
    remembered = {one: PythonState(nn.Module(), None, one) for one in parts_of(made)}
    try:
        for _ in range(2):
            for part in held.values():
                part.parameter.grad = torch.full_like(part.parameter, 0.1)
            made.step()
    except Exception as error:
        raise ValueError(
            f"optimizer: what a checkpoint has to keep of {kind_of(made)} is seen in a step on parameters and "
            f"gradients like the model's, which fails: {one_line(error)}. Ranks call step() without arguments. What "
            f"works: no checkpoint_every, checkpoint_dir and resume_from; or {ADAM}"
        ) from None
    changed = list[str]()
    for one, state in remembered.items():
        values, others = state.find_changes()
        changed += [*(".".join(place) for place in values), *others]
        inner = (key for key, held in vars(one).items() if isinstance(held, torch.optim.Optimizer))
        changed += [f"optimizer.{key}" for key in inner if vars(one)[key].state is not one.state]
    states = {str(key) for state in made.state.values() if isinstance(state, dict) for key in state}
    return tuple(sorted(states)), ", ".join(each.removeprefix("optimizer.") for each in changed)


def _plain(value: Any) -> Any:
    """Convert a value into comparable data: numbers, strings, small tensors as lists, large ones as shape and sum."""
    if isinstance(value, Tensor) and value.numel() <= 64:
        return value.tolist()
    if isinstance(value, Tensor):
        return tuple(value.shape), value.to(torch.promote_types(value.dtype, torch.float64)).sum().item()
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
