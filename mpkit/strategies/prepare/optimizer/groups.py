"""Check that an optimizer function groups parameters on the ranks as it does in a plain loop.

    here    called with the model's own parameters, as the user would call it
    there   sent as to a rank, and called with stand-ins: they have shape, dtype, class, attributes and identity of the
            model's parameters, but no values, and not the `id` that they have here

A function that groups by anything else would train with other options, and nothing would say so.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mpkit.common.exceptions import one_line, report
from mpkit.common.torch_private import FakeTensor
from mpkit.strategies.packing.packing import Packer
from mpkit.strategies.prepare.arguments.task import Rejection
from mpkit.strategies.prepare.optimizer.trial import plain
from mpkit.strategies.update.optimizer import describe_optimizer

__all__ = ["as_sent", "check_grouped"]

Parameters = Mapping[str, nn.Parameter]


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

    def __init__(self, file: io.BytesIO, parameters: Parameters) -> None:
        super().__init__(file)
        self._parameters = parameters

    def persistent_load(self, name: str) -> nn.Parameter:
        """Return the parameter of this name."""
        return self._parameters[name]


def as_sent(optimizer: Any, model: nn.Module, stand_ins: Parameters) -> Any:
    """Return the function as a rank receives it, with stand-ins where it refers to parameters of the model.

    One that cannot be sent is returned as it is: the launch says what in it stays in this process.
    """
    file = io.BytesIO()
    names = {id(p): name for name, p in model.named_parameters() if name in stand_ins}
    try:
        _NameWriter(file, names).dump(optimizer)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError):
        return optimizer
    file.seek(0)
    return _NameReader(file, stand_ins).load()


def check_grouped(
    optimizer: Any, model: nn.Module, made: torch.optim.Optimizer, stand_ins: Parameters
) -> None:
    """Check that parameters have the same options on the ranks as in a loop that gives it the model's parameters.

    Args:
        optimizer: the user's function.
        model: the user's model.
        made: what the function made of the stand-ins, as on a rank.
        stand_ins: the stand-ins of the trained parameters.

    Raises:
        Rejection: some of a parameter's options differ.
    """
    every = dict(model.named_parameters())
    if any(p.is_meta or isinstance(p.data, FakeTensor) for p in every.values()):
        return  # they have no values that a function could look at
    trained = {name: every[name] for name in stand_ins}
    frozen = [name for name in every if name not in trained]
    there = _options(made, stand_ins)
    here = _options(_make_optimizer(optimizer, trained), trained)
    name = _differs(here, there, trained)
    if name is not None:
        raise Rejection(
            f"optimizer: {name} has {_of_group(here, name)} in a loop with the model's own parameters, and "
            f"{_of_group(there, name)} on a rank. The function looks at what a rank's parameters do not have when it "
            "is called: values (p.norm()), or id(p), a number that is another in each process. What works: to group "
            "by name, optimizer=mk.optimizer.by_name(lambda named: ...); by shape (p.ndim); by an attribute of the "
            "parameter (p.no_decay = True, hasattr(p, 'no_decay')); or by the parameters themselves (p in chosen)."
        )
    if not frozen:
        return
    try:
        every_one = _options(_make_optimizer(optimizer, every), every)
    except Exception as error:
        report(
            f"optimizer: given the frozen {frozen[0]} too, as in model.parameters(), the function raises "
            f"{one_line(error)}. The ranks give it the trained parameters only; whether its groups are those of a loop "
            "that gives it all of them is not known."
        )
        return
    name = _differs(every_one, there, trained)
    if name is not None:
        raise Rejection(
            f"optimizer: {name} has other options where the function is given the trained parameters only, as mpkit "
            f"does, than where it is given model.parameters(), with the frozen {frozen[0]} among them. Group by name, "
            "which is the same for both: optimizer=mk.optimizer.by_name(lambda named: ...)"
        )


def _make_optimizer(optimizer: Callable[[Any], Any], parameters: Parameters) -> Any:
    with _hooks_as_before(parameters):
        return describe_optimizer(optimizer).make_optimizer(parameters)


def _differs(one: Mapping[str, Any], other: Mapping[str, Any], names: Mapping[str, Any]) -> str | None:
    return next((name for name in names if one.get(name) != other.get(name)), None)


def _of_group(options: Mapping[str, Any], name: str) -> str:
    values = options.get(name)
    if values is None:
        return "no group"
    return ", ".join(
        f"{key}={value}" for key, value in values.items() if key in ("lr", "weight_decay")
    ) or str(values)


def _options(made: torch.optim.Optimizer, parameters: Parameters) -> dict[str, Any]:
    """Return the options of each parameter's group, by the parameter's name."""
    names = {id(p): name for name, p in parameters.items()}
    return {
        names[id(p)]: {k: plain(v) for k, v in group.items() if k not in ("params", "param_names")}
        for group in made.param_groups
        for p in group["params"]
        if id(p) in names
    }


@contextmanager
def _hooks_as_before(parameters: Parameters) -> Iterator[None]:
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
