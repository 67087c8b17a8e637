"""Check that ranks can share the sequences of a batch (context parallelism).

data        every tensor has the sequence in dimension 1, of one length that the ranks can divide (`sequence`)
positions   the model can take the position at which its part begins
attention   tokens meet only in scaled_dot_product_attention, without a mask or dropout
outputs     are about tokens, not about the sequence as a whole
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mpkit.common.exceptions import fakes_or_real, one_line
from mpkit.common.torch_private import tree_leaves
from mpkit.strategies.comm.process_group import FakeGroup
from mpkit.strategies.context.divided_attention import ContextParallel
from mpkit.strategies.context.sequence import check_sequences, sequence_part, shift_positions
from mpkit.strategies.data.microbatch import Value, leaves, map_tensors, part
from mpkit.strategies.models.chain import layers_of
from mpkit.strategies.prepare.dry_run.copies import copy_model, without_content
from mpkit.strategies.stage.stage import call
from mpkit.trace.record.fake_mode import FakeMode

__all__ = ["check_context_parallel"]


def check_context_parallel(
    model: nn.Module,
    inputs: Value,
    targets: Value,
    n: int,
    order: str = "contiguous",
    *,
    ulysses: bool = False,
) -> None:
    """Check that n ranks can share the sequences of such a batch.

    One sample's part is run through the model: on tensors without content if it works with those, else on real ones.

    >>> from mpkit.strategies.models.gpt import GPT
    >>> tokens = torch.zeros(2, 64, dtype=torch.long)
    >>> check_context_parallel(GPT(layers=1), tokens, tokens, 4)

    Args:
        model: the whole model, on the CPU; left as it is.
        inputs, targets: a batch, [batch, s, ...].
        n: number of ranks along cp.
        order: which part each rank has.
        ulysses: whether they divide the heads.

    Raises:
        ValueError: they cannot, with the reason and what would work.
    """
    # ---- data
    check_sequences(inputs, targets, n, order)
    sample = part(inputs, slice(0, 1))

    def on_fakes() -> None:
        with FakeMode() as mode:
            fakes = map_tensors(mode.from_tensor, sample)
            _check_forward(without_content(model, mode), fakes, n, order, ulysses)

    # A model that is refused is refused again on real tensors, with numbers in the message.
    fakes_or_real(
        on_fakes,
        lambda: _check_forward(copy_model(model), sample, n, order, ulysses),
        f"A part of a sequence in {type(model).__name__}",
    )


@torch.no_grad()
def _check_forward(model: nn.Module, sample: Value, n: int, order: str, ulysses: bool) -> None:
    """Run the forward of the rank that has the end of the sequence."""
    group = FakeGroup(n, n - 1 if order == "contiguous" else 0)
    mine = sequence_part(sample, group.index, n, order)
    length = leaves(mine)[0].shape[1]
    # ---- positions
    told = shift_positions(model, group, order)
    given = isinstance(mine, dict) and mine.get("position_ids") is not None
    if not (told or given):
        raise ValueError(
            f"cp={n}: {type(model).__name__} has no way to be told that its first token is not the sequence's first. "
            "A forward that takes position_ids [batch, time] beside input_ids has (None: from 0), as transformers' "
            "models do; so has mpkit.models.GPT. A model without positions may take them and not use them."
        )
    # ---- attention
    value: Any = mine
    with ContextParallel(group, order, ulysses=ulysses) as attention:
        try:
            for i, (_, layer) in enumerate(layers_of(model)):
                value = call(layer, value, first=i == 0)
        except ValueError:
            raise
        except Exception as error:
            shapes = [list(tensor.shape) for tensor in leaves(mine)]
            raise ValueError(
                f"cp={n}: the model refuses a rank's part of the sequences, tensors of shape "
                f"{', '.join(map(str, shapes))} at the end of sequences of {length * n} tokens: "
                f"{one_line(error)}. Does it take shorter sequences than its longest?"
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
