"""The part of a sequence that a rank has, and the positions of its tokens in the whole sequence.

A sequence of s tokens is cut into pieces of equal length, and rank i of n has

    contiguous   piece i of n                      rank 0: 0      rank 1: 1      (n = 2)
    zigzag       pieces i and 2n - 1 - i of 2n     rank 0: 0 3    rank 1: 1 2

A model counts positions from 0. On a rank that has piece p, of c tokens, they are p c to p c + c - 1.

Under a causal mask a token attends only to itself and those before it. So with contiguous pieces the last rank has the
most to compute, and the others wait for it. In zigzag order all ranks compute equally much, since a rank with an early
piece has a late one, too. (Llama 3's training: Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.2.)
"""

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.common.torch_private import FakeTensor
from mpkit.plan.kinds import ORDERS
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.data.microbatch import Value, leaves, map_tensors
from mpkit.strategies.models.gpt import Embedding


def pieces(index: int, n: int, order: str = "contiguous") -> tuple[int, ...]:
    """Return the numbers of rank i's pieces.

    >>> [pieces(i, 3, "zigzag") for i in range(3)]
    [(0, 5), (1, 4), (2, 3)]
    """
    assert order in ORDERS and 0 <= index < n, (index, n, order)
    return (index,) if order == "contiguous" else (index, 2 * n - 1 - index)


def sequence_part(value: Value, index: int, n: int, order: str = "contiguous") -> Value:
    """Return rank i's part of inputs or targets along dimension 1 of each tensor that has one, as views if possible.

    >>> tokens = torch.arange(16).view(2, 8)
    >>> sequence_part({"tokens": tokens, "lengths": torch.tensor([8, 8])}, 0, 2, "zigzag")
    {'tokens': tensor([[ 0,  1,  6,  7], [ 8,  9, 14, 15]]), 'lengths': tensor([8, 8])}
    """
    wanted = pieces(index, n, order)

    def part(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or n == 1:
            return tensor
        assert tensor.shape[1] % (n * len(wanted)) == 0, "check_sequences rejects it before"
        length = tensor.shape[1] // (n * len(wanted))
        slices = [tensor.narrow(1, piece * length, length) for piece in wanted]
        return slices[0] if len(slices) == 1 else torch.cat(slices, 1)

    return map_tensors(part, value)


def check_sequences(inputs: Value, targets: Value, n: int, order: str = "contiguous") -> int:
    """Return the length s that all tensors have in common, after checking that n ranks can share the data."""
    if order not in ORDERS:
        raise ValueError(f"order={order!r}: it is {' or '.join(map(repr, ORDERS))}.")
    tensors = [*leaves(inputs), *leaves(targets)]
    shapes = [list(tensor.shape) for tensor in tensors]
    lengths = {tensor.shape[1] if tensor.dim() > 1 else None for tensor in tensors}
    if len(lengths) != 1 or None in lengths:
        raise ValueError(
            f"cp={n} cuts sequences in dimension 1, so every tensor of inputs and targets is [batch, s, ...] with the "
            f"same s; these have shapes {', '.join(map(str, shapes))}. A target for each token has one, a class for "
            "each sequence has not: train that with cp=1."
        )
    (s,) = lengths
    assert s is not None
    unit = n * len(pieces(0, n, order))
    if s % unit or s // unit < 2:
        down, up = max(2 * unit, s // unit * unit), max(2 * unit, -(-s // unit) * unit)
        fits = [c for c in range(1, n) if s % (c * unit // n) == 0 and s // (c * unit // n) > 1]
        halves = " into two pieces each" if order != "contiguous" else ""
        either = f"s={up}" if down == up or down > s else f"s={down} or s={up}"
        raise ValueError(
            f"Sequences of s={s} tokens on cp={n} ranks: they share them equally{halves}, two tokens a piece at "
            f"least. {either} would do" + (f", or cp={fits[-1]}." if fits else ".")
        )
    for value in (inputs, targets):
        _check_names(value, n)
    return s


def _check_names(value: Value, n: int) -> None:
    """Reject inputs that transformers' models would apply to a part as if it were the whole sequence."""
    check_not_packed(value, n)
    if not isinstance(value, dict):
        return
    if "labels" in value:
        raise ValueError(
            f"cp={n}: with labels among its inputs a model makes the loss itself, and shifts them by a token within "
            "its part, which loses one target a part. Shift them in the data, give them as targets, and compare in "
            "loss=, as in loss=lambda out, y: F.cross_entropy(out.logits.flatten(0, 1), y.flatten())."
        )
    mask = value.get("attention_mask")
    if mask is not None and not bool((mask != 0).all()):
        raise ValueError(
            f"cp={n}: attention_mask hides tokens, and keys and values go round the ranks without a mask. Use "
            "sequences without padding, or cp=1. Padding at the end of a causal model's "
            "sequences needs no mask, since nothing before it looks at it."
        )


def check_not_packed(inputs: Value, n: int) -> None:
    """Reject sequences of several documents, which do not attend to each other: keys go round without a mask."""
    positions = inputs.get("position_ids") if isinstance(inputs, dict) else None
    if positions is None or positions.dim() != 2 or isinstance(positions, FakeTensor):
        return
    if n > 1 and bool((positions.diff(dim=1) != 1).any()):
        raise ValueError(
            f"cp={n}: position_ids begin anew within a sequence, which is several documents packed. Attention over "
            "divided sequences does not stop between documents. Train packed sequences with cp=1; position_ids that go "
            "on through the whole sequence let tokens attend to earlier documents."
        )


TOKENS = ("input_ids", "inputs_embeds")


def positions_of(length: int, part: tuple[int, ...], device: torch.device | None = None) -> Tensor:
    """Return the positions [length] of the tokens of some pieces.

    >>> positions_of(4, (0, 3))
    tensor([0, 1, 6, 7])
    """
    c = length // len(part)
    return torch.cat([torch.arange(p * c, p * c + c, device=device) for p in part])


def shift_positions(model: nn.Module, group: Communicator, order: str = "contiguous") -> int:
    """Tell a model, once, which part of sequences it will receive; return how many of its modules take positions.

    In the kit's GPT this is the embedding. Any other module whose forward takes position_ids, and input_ids or
    inputs_embeds, [batch, time], as transformers' models do, receives the position_ids, unless its caller passes some.

    >>> from mpkit.strategies.models.gpt import GPT
    >>> from mpkit.strategies.comm.fake_group import FakeGroup
    >>> model = GPT(layers=1)
    >>> shift_positions(model, FakeGroup(4, 2)), model.embedding.pieces
    (1, (2,))
    """
    part, count = pieces(group.index, group.size, order), 0
    inner: set[nn.Module] = set()  # whose positions an outer module passes on
    for module in model.modules():
        if isinstance(module, Embedding):
            module.pieces = part
            count += 1
        elif module not in inner and _takes_positions(module):
            module.register_forward_pre_hook(partial(_add_positions, part), with_kwargs=True)
            inner.update(module.modules())
            count += 1
    return count


def _takes_positions(module: nn.Module) -> bool:
    names = inspect.signature(type(module).forward).parameters
    return "position_ids" in names and any(name in names for name in TOKENS)


def _add_positions(
    part: tuple[int, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any] | None:
    """Add the position_ids to a forward's arguments."""
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
