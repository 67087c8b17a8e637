"""Positions: where in the sequence the tokens on a rank are.

A model counts positions from 0. On a rank that has piece p, of c tokens, they are p c to p c + c - 1.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.strategies.comm.process_group import ProcessGroup
from mpkit.strategies.context.sequence import pieces
from mpkit.strategies.models.gpt import Embedding

__all__ = ["positions_of", "shift_positions"]

TOKENS = ("input_ids", "inputs_embeds")


def positions_of(length: int, part: tuple[int, ...], device: torch.device | None = None) -> Tensor:
    """Return the positions of the tokens of some pieces, [length].

    >>> positions_of(4, (0, 3))
    tensor([0, 1, 6, 7])

    Args:
        length: length of the pieces together.
        part: numbers of the pieces.
        device: device of the result.
    """
    c = length // len(part)
    return torch.cat([torch.arange(p * c, p * c + c, device=device) for p in part])


def shift_positions(model: nn.Module, group: ProcessGroup, order: str = "contiguous", row: int = 1) -> int:
    """Set in a model which part of the sequences it will receive, once per model.

    In the kit's GPT the embedding is set. Any other module whose forward takes position_ids, and input_ids or
    inputs_embeds, [batch, time], as transformers' models do, receives the position_ids, unless its caller passes some.

    >>> from mpkit.strategies.models.gpt import GPT
    >>> from mpkit.strategies.comm.process_group import FakeGroup
    >>> model = GPT(layers=1)
    >>> shift_positions(model, FakeGroup(4, 2)), model.embedding.pieces
    (1, (2,))

    Args:
        model: a model, or some of its layers.
        group: the ranks of the axis along which sequences are divided.
        order: which part each rank has.
        row: the number of ranks that divide heads.

    Returns:
        The number of modules that were set; 0 if none takes positions, or if the model counts them internally.
    """
    part, told = pieces(group.index, group.size, order, row), 0
    inner: set[nn.Module] = set()  # whose positions an outer module passes on
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
    """Add the position_ids to a forward's arguments, as a forward pre-hook."""
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
