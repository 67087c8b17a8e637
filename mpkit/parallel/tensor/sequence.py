"""Sequence parallelism: between regions, each rank works on its part of the sequence.

Layer norms, dropouts and residuals work on each token by itself, and under tensor parallelism alone all ranks would
repeat the same work there. So

    first module    its input is scattered: each rank takes s/t tokens
    regions         f_bar gathers the sequence, g_bar scatters the sums
    dropouts        draw differently on each rank, since the tokens differ
    last module     its output is gathered

The parameters there get gradients from a part of the tokens on each rank, which are summed over the ranks.

`mpkit.reference.tensor.sequence_parallel` is this in 40 lines. This module adds any model, and dropout.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023, section 4.2.2.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mpkit.comm.process_group import ProcessGroup
from mpkit.models.randomness import may_draw
from mpkit.parallel.tensor.draws import OwnDraws
from mpkit.parallel.tensor.operators import gather, scatter

__all__ = ["divide_sequence", "modules_between"]


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


def divide_sequence(model: nn.Module, group: ProcessGroup, first: str, last: str) -> None:
    """Scatter before the first module, gather after the last, and let modules in between draw their own numbers."""
    modules = dict(model.named_modules())

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (scatter(group, args[0]), *args[1:]), kwargs
        name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
        return args, kwargs | {name: scatter(group, kwargs[name])}

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return gather(group, output)
        return (gather(group, output[0]), *output[1:])

    modules[first].register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    modules[last].register_forward_hook(leave)
    for name in modules_between(model, first, last):
        module = modules[name]
        if (
            not list(module.children())
            and type(module).__module__.startswith("torch.nn")
            and may_draw(module)
        ):
            _draw_apart(module, OwnDraws(name, group.index))


def _draw_apart(module: nn.Module, draws: OwnDraws) -> None:
    def begin(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if module.training and inputs and isinstance(inputs[0], Tensor):
            draws.begin(inputs[0].device)

    def end(*_: Any) -> None:
        draws.end()

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end)
