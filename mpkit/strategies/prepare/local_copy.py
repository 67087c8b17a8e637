"""The model as ranks will have it, for the dry runs: sharded, and with its positions in the sequence set."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.common.exceptions import fakes_or_real, one_line
from mpkit.common.torch_private import tree_leaves
from mpkit.plan.plan import Plan
from mpkit.plan.schedule import Schedule
from mpkit.strategies.comm.process_group import FakeGroup
from mpkit.strategies.context.divided_attention import ContextParallel
from mpkit.strategies.context.sequence import check_sequences, sequence_part, shift_positions
from mpkit.strategies.data.microbatch import Value, leaves, map_tensors, part
from mpkit.strategies.experts.known_experts import check_experts_of
from mpkit.strategies.models.chain import layers_of
from mpkit.strategies.prepare.copies import copy_model, without_content
from mpkit.strategies.runtime.local_model import attention_over, localize
from mpkit.strategies.stage.shard import ShardedModel
from mpkit.strategies.stage.stage import call
from mpkit.trace.record.fake_mode import FakeMode

__all__ = ["LocalCopy", "check_context_parallel", "local_copies"]


@dataclass(frozen=True)
class LocalCopy:
    """A rank's model and its part of the data.

    Attributes:
        model: the rank's model; the caller's own if nothing is divided.
        sharded: the result of tensor parallelism.
        cut: returns the rank's part of inputs or targets.
        attention: returns the context in which its forward runs.
        tp: the group with which it shares its layers.
    """

    model: nn.Module
    sharded: ShardedModel
    cut: Callable[[Value], Value]
    attention: Callable[[], AbstractContextManager[Any]]
    tp: FakeGroup

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the shards, by the parameters' names."""
        return {name: shard.shape for name, shard in self.sharded.shards.items()}

    def free(self) -> None:
        """Free the shards, which would otherwise stay until Python collects reference cycles.

        All other tensors are the caller's.
        """
        for name in self.sharded.shards:
            self.model.get_parameter(name).data = torch.empty(0)


def local_copies(
    model: nn.Module, plan: Plan, schedule: Schedule, batch: tuple[Value, Value]
) -> list[LocalCopy]:
    """Return the model as the ranks along tp hold it; one copy if all hold the same shapes."""
    first = _copy_for(model, plan, schedule, batch, 0)
    if plan.tp == 1:
        return [first]
    last = _copy_for(model, plan, schedule, batch, plan.tp - 1)
    if first.shapes == last.shapes:
        last.free()
        return [first]
    between = [_copy_for(model, plan, schedule, batch, place) for place in range(1, plan.tp - 1)]
    return [first, *between, last]


def _copy_for(
    model: nn.Module, plan: Plan, schedule: Schedule, batch: tuple[Value, Value], place: int
) -> LocalCopy:
    """Copy the model as the rank at `place` would hold it.

    Args:
        model: the whole model; it is not changed.
        plan: the plan, of which tp, cp, ep and related options are used; `schedule`: its schedule.
        batch: the largest batch, whose sequences are divided along cp.
        place: the rank's place along tp; along cp and ep it is place 0.

    Raises:
        ValueError: layers or sequences cannot be divided among so many ranks.
    """
    if plan.cp > 1 and place == 0:
        check_context_parallel(model, *batch, plan.cp, plan.cp_order, ulysses=plan.cp_method == "ulysses")
    check_experts_of(model, plan)
    mesh = plan.mesh
    tp = FakeGroup(plan.tp, place)

    def group_of(axis: str) -> FakeGroup:
        return tp if axis == "tp" else FakeGroup(mesh.degree(axis))

    sharded = ShardedModel()
    if plan.tp > 1 or plan.cp > 1 or plan.ep > 1:
        # Modules of its own with the caller's tensors: shards are copies of these, and nothing else is written into.
        model = copy_model(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
        sharded = localize(model, plan, schedule, group_of)
    cut = partial(sequence_part, index=0, n=plan.cp, order=plan.cp_order)
    return LocalCopy(model, sharded, cut, attention_over(plan, group_of, sharded.draws), tp)


# ---- context parallelism -------------------------------------------------------------------------------------


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
