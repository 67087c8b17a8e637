"""What cannot be shared out, said before any rank starts.

data        every tensor has the sequence in dimension 1, of one length that the ranks divide (`sequence`)
positions   the model can be told where its part begins
attention   its tokens meet in scaled_dot_product_attention, without a mask or dropout, and nowhere else
outputs     are about tokens, not about the sequence as a whole
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from mpkit.models.chain import layers_of
from mpkit.parallel.axis import Pretended
from mpkit.parallel.context.inside import ContextParallel
from mpkit.parallel.context.positions import shift_positions
from mpkit.parallel.context.sequence import check_sequences, sequence_part
from mpkit.parallel.microbatch import Value, leaves, map_tensors, part
from mpkit.parallel.stage import call

__all__ = ["check_context_parallel", "without_content"]


def check_context_parallel(
    model: nn.Module, inputs: Value, targets: Value, n: int, order: str = "contiguous"
) -> None:
    """Whether n ranks can share the sequences of such a batch.

    One sample's part goes through the model, on tensors without content if it can do with those, else for real.

    >>> from mpkit.models.gpt import GPT
    >>> tokens = torch.zeros(2, 64, dtype=torch.long)
    >>> check_context_parallel(GPT(layers=1), tokens, tokens, 4)

    Args:
        model: the whole one, on the CPU; left as it is.
        inputs, targets: a batch, [batch, s, ...].
        n: ranks along cp.
        order: which part each has.

    Raises:
        ValueError: they cannot, with the reason and what would work.
    """
    # ---- data
    check_sequences(inputs, targets, n, order)
    sample = part(inputs, slice(0, 1))
    if not _passes_without_content(model, sample, n, order):
        # Either it refuses again, in words for the user, or only the tensors without content were to blame.
        _check_forward(copy.deepcopy(model), sample, n, order)


def _passes_without_content(model: nn.Module, sample: Value, n: int, order: str) -> bool:
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = map_tensors(mode.from_tensor, sample)
            _check_forward(without_content(model, mode), fakes, n, order)
    except Exception:  # whatever it is, the real run says it
        return False
    return True


@torch.no_grad()
def _check_forward(model: nn.Module, sample: Value, n: int, order: str) -> None:
    """One rank's forward, the one's that has the end of the sequence."""
    line = Pretended(n, n - 1 if order == "contiguous" else 0)
    mine = sequence_part(sample, line.index, n, order)
    length = leaves(mine)[0].shape[1]
    # ---- positions
    told = shift_positions(model, line, order)
    given = isinstance(mine, dict) and mine.get("position_ids") is not None
    if not (told or given):
        raise ValueError(
            f"cp={n}: {type(model).__name__} has no way to be told that its first token is not the sequence's first. "
            "A forward that takes position_ids [batch, time] beside input_ids has (None: from 0), as transformers' "
            "models do; so has mpkit.models.gpt.GPT. A model without positions may take them and not use them."
        )
    # ---- attention
    value: Any = mine
    with ContextParallel(line, order) as attention:
        try:
            for i, (_, layer) in enumerate(layers_of(model)):
                value = call(layer, value, first=i == 0)
        except ValueError:
            raise
        except Exception as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            shapes = [list(tensor.shape) for tensor in leaves(mine)]
            raise ValueError(
                f"cp={n}: the model refuses a rank's part of the sequences, tensors of shape "
                f"{', '.join(map(str, shapes))} at the end of sequences of {length * n} tokens: {said}. Does it take "
                "shorter sequences than its longest?"
            ) from None
    attention.check_used()
    # ---- outputs
    shapes = [list(leaf.shape) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    if not any(len(shape) > 1 and shape[1] == length for shape in shapes):
        raise ValueError(
            f"cp={n}: of sequences [batch, {length}] the model makes {', '.join(map(str, shapes)) or 'no tensor'}, "
            "so what it says is about the sequence as a whole, of which no rank has more than a part. Models that say "
            f"something of every token, [batch, {length}, ...], can share sequences out; for this one take cp=1."
        )


def without_content(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of the model, whose tensors have no content."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        fake = mode.from_tensor(tensor.detach())
        memo[id(tensor)] = nn.Parameter(fake, False) if isinstance(tensor, nn.Parameter) else fake
    return copy.deepcopy(model, memo)
