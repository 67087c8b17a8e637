"""Recomputation block by block: a repeated block keeps its inputs, and recomputes the rest in the backward.

    forward     runs the block without a graph and keeps its inputs, which are the outputs of the block before
    backward    runs the block again, with a graph, the same dropout and the same buffers; then computes its gradients

So a stage holds the boundaries between its blocks, and the activations within one block at a time. Where a backward is
split, I recomputes the block and leaves its W to the stage's W.

Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", MLSys 2023, section 5: 2 s b h bytes per layer in 16 bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.errors import MpkitError
from mpkit.plan.kinds import every
from mpkit.strategies.models.blocks import repeated_blocks
from mpkit.strategies.models.containers import Containers, bring_back
from mpkit.strategies.models.nested_values import flatten, rebuild
from mpkit.strategies.models.own_draws import OwnDraws
from mpkit.strategies.partition.graph import PartitionedModel
from mpkit.strategies.stage.recomputed_call import (
    MADE,
    BlockCall,
    ForwardContext,
    PassedThrough,
    RecomputedCall,
    RecomputeScope,
)
from mpkit.strategies.stage.second_forward import SecondForward, StartingPoint

__all__ = [
    "RecomputeScope",
    "RecomputedBlock",
    "blocks_to_recompute",
    "chosen_blocks",
    "recompute_blocks",
    "without_caches",
]

CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
"""Names by which transformers' models pass a block the keys and values of earlier tokens; training has none."""


def chosen_blocks(recompute: str, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the blocks that `Plan(recompute=...)` recomputes: all, or every k-th as in torchtitan.

    >>> blocks = {str(i): nn.Identity() for i in range(5)}
    >>> list(chosen_blocks("full", blocks)), list(chosen_blocks("every=2", blocks)), chosen_blocks("none", blocks)
    (['0', '1', '2', '3', '4'], ['1', '3'], {})
    """
    k = every(recompute)
    return {} if not k else {name: block for i, (name, block) in enumerate(blocks.items(), 1) if i % k == 0}


def recompute_blocks(
    model: nn.Module, recompute: str, partition: PartitionedModel | None
) -> list[RecomputedBlock]:
    """Let the blocks that a plan chooses be recomputed from now on."""
    chosen = blocks_to_recompute(model, recompute, partition)
    return [RecomputedBlock(name, block) for name, block in chosen.items()]


def blocks_to_recompute(
    model: nn.Module, recompute: str, partition: PartitionedModel | None
) -> dict[str, nn.Module]:
    """Return the modules of a model that a plan recomputes, by name.

    A block that a pipeline cuts through (an *opened* block) is not recomputed itself, but the pieces that it calls are.
    """
    chosen: dict[str, nn.Module] = {}
    for name, block in chosen_blocks(recompute, repeated_blocks(model)).items():
        if partition is not None and name in partition.modules:
            inside = [inner for inner in partition.blocks if inner.startswith(f"{name}.")]
            chosen |= {inner: model.get_submodule(inner) for inner in inside}
        else:
            chosen[name] = block
    return chosen


def without_caches(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a block's arguments without transformers' caches, into which a second forward would write again."""
    names = list(inspect.signature(forward).parameters)
    args = tuple(None if name in CACHES else arg for name, arg in zip_longest(names[: len(args)], args))
    kwargs = kwargs | {key: None for key in CACHES if key in kwargs}
    return args, kwargs | ({"use_cache": False} if kwargs.get("use_cache") else {})


class RecomputedBlock:
    """A block of the model that is recomputed from now on.

    Attributes:
        around: the context of its stage; None outside of training, where the block computes as usual.
        twice: what its forwards change besides their outputs.
    """

    def __init__(self, name: str, block: nn.Module) -> None:
        self.name, self.block = name, block
        self.around: RecomputeScope | None = None
        self.twice = SecondForward(block)
        self._draws_others: bool | None = None  # random numbers that are not torch's; None: not known yet
        self._is_kept: bool | None = None  # because it writes into its inputs; None: not known yet
        self._checked: set[Any] = set()  # shapes for which the second forward was compared
        block.forward = self._wrap(block.forward)  # within its hooks, which run once

    @property
    def _draws(self) -> OwnDraws:
        assert self.around is not None
        return self.around.draws

    def _wrap(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.around is None or not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            return self._call(inner, *without_caches(inner, args, kwargs))

        return forward

    def _call(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, shape = flatten((args, kwargs))
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[i] for i in where]
        trains = any(parameter.requires_grad for parameter in self.block.parameters())
        if not trains and not any(tensor.requires_grad for tensor in tensors):
            return inner(*args, **kwargs)

        returned: list[tuple[int, int]] = []

        def compute(given: list[Tensor]) -> tuple[list[Any], Any]:
            for i, tensor in zip(where, given, strict=True):
                leaves[i] = tensor
            again_args, again_kwargs = rebuild(shape, leaves)
            for i in where:
                leaves[i] = None
            containers = Containers((again_args, again_kwargs))
            result = inner(*again_args, **again_kwargs)
            returned[:] = containers.returned_containers(result)
            return flatten(result)

        if self._is_kept is None:
            self._is_kept = self._writes(compute, tensors)
        if self._is_kept:
            return inner(*args, **kwargs)
        # A tensor that requires a gradient, so that the block has a backward even if its inputs need none.
        anchor = torch.zeros((), requires_grad=not any(tensor.requires_grad for tensor in tensors))
        setting = ForwardContext.now(tensors, self._draws, others=self._draws_others is not False)
        call = BlockCall(self, compute, setting)
        results = RecomputedCall.apply(call, anchor, *tensors)  # type: ignore[no-untyped-call]
        if self._draws_others is None and setting.others is not None:
            self._draws_others = not setting.others.is_now()
        made = iter(results if isinstance(results, tuple) else (results,))
        outputs = [
            tensors[leaf.place] if isinstance(leaf, PassedThrough) else next(made) if leaf is MADE else leaf
            for leaf in call.outputs
        ]
        result = rebuild(call.shape, outputs)
        bring_back((args, kwargs), result, returned)
        return result

    def _writes(self, compute: Callable[[list[Tensor]], Any], tensors: list[Tensor]) -> bool:
        """Return whether the block writes into its inputs, tried on copies if any of its modules works in place."""
        if not any(getattr(module, "inplace", False) for module in self.block.modules()):
            return False
        copies = [tensor.detach().clone() for tensor in tensors]
        versions = [copy._version for copy in copies]
        with (
            torch.no_grad(),
            ForwardContext.now(tensors, self._draws, others=True).restore(),
            StartingPoint(self.block, None).begin_again(),
        ):
            compute(copies)
        return [copy._version for copy in copies] != versions

    def check(self, key: Any, before: list[tuple[Tensor, int]], after: list[Tensor]) -> None:
        """Check, once per shape, that the second forward gives what the first did.

        An output that a later layer has overwritten (a ReLU that works in place) cannot be compared any more.
        """
        self._checked.add(key)
        same = len(before) == len(after) and all(
            one.shape == other.shape
            and (one._version != version or torch.allclose(one, other, rtol=1e-2, atol=1e-5, equal_nan=True))
            for (one, version), other in zip(before, after, strict=True)
        )
        if not same:
            raise MpkitError(
                f"{self.name} ({type(self.block).__name__}) computed something else when its forward was done again "
                "for its backward: it keeps something from call to call, such as a cache, a counter or random numbers "
                "that are not torch's. Keep all activations, Plan(recompute='none'), or only attentions, "
                "Plan(recompute='selective')"
            )
