"""Positions: where in the sequence the tokens stand that a rank's model sees.

A model counts them from 0. On a rank that has piece p of the sequence, of c tokens, they are p c to p c + c - 1.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.models.gpt import Embedding
from mpkit.parallel.axis import Line
from mpkit.parallel.context.sequence import pieces

__all__ = ["positions_of", "shift_positions"]

TOKENS = ("input_ids", "inputs_embeds")


def positions_of(length: int, part: tuple[int, ...], device: torch.device | None = None) -> Tensor:
    """Where the tokens of some pieces stand, [length].

    >>> positions_of(4, (0, 3))
    tensor([0, 1, 6, 7])

    Args:
        length: of the pieces together.
        part: their numbers.
        device: of the result.
    """
    c = length // len(part)
    return torch.cat([torch.arange(p * c, p * c + c, device=device) for p in part])


def shift_positions(model: nn.Module, line: Line, order: str = "contiguous") -> int:
    """Tell a model, in place, which part of the sequences it will be given. Once a model.

    The kit's GPT is told by its embedding. Any other module whose forward takes position_ids, and input_ids or
    inputs_embeds, [batch, time], as transformers' models do, is given the position_ids, unless its caller gives some.

    >>> from mpkit.models.gpt import GPT
    >>> from mpkit.parallel.axis import Pretended
    >>> model = GPT(layers=1)
    >>> shift_positions(model, Pretended(4, 2)), model.embedding.pieces
    (1, (2,))

    Args:
        model: or some of its layers.
        line: the axis along which sequences are cut.
        order: which part each rank has.

    Returns:
        how many modules were told; 0: nobody asks for positions, or the model counts them out of sight.
    """
    part, told = pieces(line.index, line.size, order), 0
    inner: set[nn.Module] = set()  # whose positions somebody further out passes on
    for module in model.modules():
        if isinstance(module, Embedding):
            module.pieces = part
            told += 1
        elif module not in inner and _takes_positions(module):
            module.register_forward_pre_hook(partial(_add_positions, part), with_kwargs=True)
            inner.update(module.modules())
            told += 1
    return told


def _takes_positions(module: nn.Module) -> bool:
    names = inspect.signature(type(module).forward).parameters
    return "position_ids" in names and any(name in names for name in TOKENS)


def _add_positions(
    part: tuple[int, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any] | None:
    """A forward pre-hook."""
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    tokens = next((given.arguments[name] for name in TOKENS if given.arguments.get(name) is not None), None)
    if given.arguments.get("position_ids") is not None or tokens is None:
        return None
    if any(hasattr(inner, "create_position_ids_from_input_ids") for inner in module.modules()):
        raise ValueError(
            f"{type(module).__name__} numbers its positions in a way of its own (from padding_idx + 1, leaving out "
            "padding), so mpkit cannot number those of a part. Give them in the inputs, as a dict with "
            "position_ids [batch, s]: without padding, torch.arange(s).expand(batch, s) + padding_idx + 1."
        )
    given.arguments["position_ids"] = positions_of(tokens.shape[1], part, tokens.device)[None]
    return given.args[1:], given.kwargs
