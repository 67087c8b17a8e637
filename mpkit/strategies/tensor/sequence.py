"""Sequence parallelism: between regions, each rank works on its part of the sequence.

Layer norms, dropouts and residuals work on each token by itself, and under tensor parallelism alone all ranks would
repeat the same work there. So

    first module    its input is scattered: each rank takes s/t tokens
    regions         f_bar gathers the sequence, g_bar scatters the sums
    random numbers  are drawn by each rank for its own tokens, and by all alike for what all tokens share
    last module     its output is gathered

The parameters there get gradients from a part of the tokens on each rank, which are summed over the ranks.

`mpkit.strategies.reference.tensor.sequence_parallel` is this in 40 lines. This module adds any model, and dropout.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from mpkit.strategies.comm.process_group import ProcessGroup
from mpkit.strategies.models.own_draws import OwnDraws
from mpkit.strategies.models.randomness import may_draw
from mpkit.strategies.models.spans import ForwardSpan
from mpkit.strategies.tensor.operators import gather, scatter

__all__ = ["divide_sequence", "modules_between"]

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def modules_between(model: nn.Module, first: str, last: str) -> set[str]:
    """Return the names from the first module to the last, with those within each, in the order of `named_modules`.

    Raises:
        ValueError: the last comes before the first.
    """
    names = [name for name, _ in model.named_modules()]
    if names.index(last) < names.index(first):
        raise ValueError(
            f"TensorPlan(sequence=({first!r}, {last!r})): the model has {last!r} before {first!r}. The first is where "
            "the sequence is scattered, the last where it is gathered"
        )
    end = max(i for i, name in enumerate(names) if name == last or name.startswith(f"{last}."))
    return set(names[names.index(first) : end + 1])


def divide_sequence(model: nn.Module, group: ProcessGroup, draws: OwnDraws, first: str, last: str) -> None:
    """Scatter before the first module, gather after the last, and draw for this rank's tokens in between."""
    modules = dict(model.named_modules())
    name = f"sequence on {group.index}"
    draws.spans.insert(0, ForwardSpan(name, first, last))  # regions are inside

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = "" if args else "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
        x = scatter(group, args[0] if args else kwargs[key])
        if module.training:
            draws.begin(name, x.device)
        return ((x, *args[1:]), kwargs) if args else (args, kwargs | {key: x})

    def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
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
    """Yield the modules that may draw and are in no other of these, but for chains, which are taken apart."""
    for name in names:
        parent = name.rpartition(".")[0]
        while parent and (parent not in names or isinstance(modules[parent], CONTAINERS)):
            parent = parent.rpartition(".")[0]
        if not parent and may_draw(modules[name]) and not isinstance(modules[name], CONTAINERS):
            yield name
