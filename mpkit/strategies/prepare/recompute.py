"""Checks of recomputation: that it recomputes something, and that a block can be computed twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mpkit.common.exceptions import fakes_or_real
from mpkit.common.torch_private import TorchDispatchMode
from mpkit.plan.rules import call_of
from mpkit.strategies.data.microbatch import Value, map_tensors, part
from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.models.blocks import repeated_blocks
from mpkit.strategies.models.containers import Containers
from mpkit.strategies.models.nested_values import flatten, is_opaque
from mpkit.strategies.prepare.arguments.task import Rejection, Task
from mpkit.strategies.prepare.dry_run.copies import copy_model, without_content
from mpkit.strategies.stage.block_recompute import blocks_to_recompute, chosen_blocks, without_caches
from mpkit.strategies.stage.stage import call
from mpkit.trace.record.fake_mode import FakeMode

__all__ = ["check_kept_tensors", "check_recomputed_blocks", "count_recomputed"]


def count_recomputed(model: nn.Module, recompute: str) -> tuple[int, int]:
    """Return how many of a model's repeated blocks are recomputed, and how many blocks there are."""
    blocks = repeated_blocks(model)
    return len(chosen_blocks(recompute, blocks)), len(blocks)


def check_recomputed_blocks(resolved: ResolvedPlan, task: Task) -> Rejection | None:
    """Reject the recomputation of every k-th block of a model that has fewer than k."""
    plan, blocks = resolved.plan, repeated_blocks(task.model)
    if plan.recompute.startswith("every=") and not chosen_blocks(plan.recompute, blocks):
        have = f"has {len(blocks)}" if blocks else "has none that mpkit.models.repeated_blocks finds"
        instead = {"recompute": "every=2" if len(blocks) > 1 else "full"}
        return Rejection(
            f"Plan(recompute={plan.recompute!r}) recomputes one of so many repeated blocks, and "
            f"{type(task.model).__name__} {have}: nothing would be recomputed. Write {call_of(plan, instead)}"
        )
    return None


class Keeps(Exception):
    """Raised in a forward by a block that keeps something; says what."""


def check_kept_tensors(resolved: ResolvedPlan, task: Task) -> Rejection | None:
    """Reject recomputed blocks that hand on more than they return: a tensor in an attribute, a list or a closure.

    The first forward has no graph. So a tensor that the block keeps, in an attribute (a mixture of experts' auxiliary
    loss), a list or a closure, is one through which no gradient flows, and what the block writes into a list that it
    was given never arrives. Two samples without content show what is kept: what the block made, did not return, and
    somebody holds when it is over.
    """
    plan, model = resolved.plan, task.model
    if not blocks_to_recompute(model, plan.recompute, resolved.partition):
        return None
    few = part(task.batch[0], slice(0, 2))

    def run(model: nn.Module, inputs: Value) -> None:
        for name, block in blocks_to_recompute(model, plan.recompute, resolved.partition).items():
            block.forward = partial(_watch_block, name, block, block.forward)
        with torch.enable_grad():
            call(model, inputs, first=True)

    def on_fakes() -> None:
        with FakeMode() as mode:
            run(without_content(model, mode), map_tensors(mode.from_tensor, few))

    try:
        fakes_or_real(on_fakes, lambda: run(copy_model(model), few), type(model).__name__, final=(Keeps,))
    except Keeps as what:
        return Rejection(
            f"Plan(recompute={plan.recompute!r}) computes a block's forward twice, the first time without a graph, and "
            f"{what}. Let the block return it; of what is only looked at, .detach() can be kept; or "
            f"{call_of(plan, {'recompute': 'selective'})}, or recompute='none', which compute blocks once"
        )
    return None


def _watch_block(name: str, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a block's forward, and look what is left of it."""
    args, kwargs = without_caches(forward, args, kwargs)
    containers = Containers((args, kwargs))
    with (
        NewTensors() as made,
        saved_tensors_hooks(torch.detach, lambda saved: saved),
    ):  # so that autograd holds none of them
        output = forward(*args, **kwargs)
    who = f"{name} ({type(block).__name__})"
    if lost := containers.lost_containers(output):
        raise Keeps(f"{who} changes a {type(lost[0]).__name__} that it was given, of which it gets a copy")
    given, leaves = flatten((args, kwargs))[0], flatten(output)[0]
    for leaf in (*given, *leaves):
        if is_opaque(leaf):
            raise Keeps(f"{who} takes or returns a {type(leaf).__name__}, in which nobody finds the tensors")
    returned = {leaf.untyped_storage()._cdata for leaf in (*given, *leaves) if isinstance(leaf, Tensor)}
    if made.alive(returned):
        gc.collect()  # which frees what only a cycle holds
    if kept := made.alive(returned):
        where = _holder(name, block, kept[0]) or "a list, a closure or a hook outside of it"
        raise Keeps(f"{who} keeps a tensor of shape {list(kept[0].shape)} that it made, in {where}")
    return output


class NewTensors(TorchDispatchMode):
    """Remembers what is made inside the block, and keeps none of it alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._made += [weakref.ref(leaf) for leaf in flatten(out)[0] if isinstance(leaf, Tensor)]
        return out

    def alive(self, returned: set[int]) -> list[Tensor]:
        """Return the tensors with a graph that somebody holds, without those of these storages."""
        tensors = [tensor for ref in self._made if (tensor := ref()) is not None]
        return [t for t in tensors if t.requires_grad and t.untyped_storage()._cdata not in returned]


def _holder(name: str, block: nn.Module, kept: Tensor) -> str:
    """Return the attribute that holds a tensor, "" if none does."""
    for inner, module in block.named_modules(prefix=name):
        for attribute, value in vars(module).items():
            if any(leaf is kept for leaf in flatten(value)[0]):
                return f"{inner}.{attribute}"
    return ""
