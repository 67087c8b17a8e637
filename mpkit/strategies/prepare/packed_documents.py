"""Check of packed sequences that ranks share: the model attends by document, and the order can divide the documents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from mpkit.plan.checks import call_of
from mpkit.plan.chunks import deal_chunks
from mpkit.plan.plan import Plan
from mpkit.strategies.context.layout import packed_lengths
from mpkit.strategies.data.microbatch import Value, leaves, part
from mpkit.strategies.job.feed import WholeBatches
from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.models.chain import layers_of
from mpkit.strategies.models.gpt import document_mask
from mpkit.strategies.prepare.arguments.task import Rejection, Task
from mpkit.strategies.prepare.dry_run.copies import copy_model
from mpkit.strategies.prepare.dry_run.isolation import quiet
from mpkit.strategies.stage.stage import call

__all__ = ["check_packed_documents"]


def check_packed_documents(resolved: ResolvedPlan, task: Task) -> Rejection | None:
    """Reject packed sequences (position_ids that begin anew) shared by ranks, unless the model attends by document and
    the order can divide each of them.
    """
    plan = resolved.plan
    if plan.cp == 1:
        return None
    batches = task.batches if isinstance(task.batches, WholeBatches) else task.sizes
    packed = [(inputs, lengths) for inputs, _ in batches if (lengths := packed_lengths(inputs)) is not None]
    for _, lengths in packed:
        for documents in dict.fromkeys(lengths):
            try:
                deal_chunks(documents, plan.mesh.cp_ring, plan.cp_order)
            except ValueError as error:
                return Rejection(
                    f"{plan}: {str(error).removesuffix('.')}: {call_of(plan, {'cp_order': 'balanced'})}"
                )
    if not packed:
        return None
    inputs, lengths = packed[0]
    sample = next(i for i, documents in enumerate(lengths) if len(documents) > 1)
    return _check_masks(plan, task, part(inputs, slice(sample, sample + 1)))


def _check_masks(plan: Plan, task: Task, sample: Value) -> Rejection | None:
    """Reject a model whose attentions are not those within documents, on a whole packed sequence."""
    assert isinstance(sample, dict)
    masks = _Masks()
    value: Any = sample
    with torch.no_grad(), quiet(), masks:
        for i, (_, layer) in enumerate(layers_of(copy_model(task.model))):
            value = call(layer, value, first=i == 0)
    wanted = document_mask(sample["position_ids"])
    for hidden in masks.hidden:
        if not torch.equal(hidden, ~wanted.expand_as(hidden)):
            s = leaves(sample)[0].shape[1]
            return Rejection(
                f"{plan}: position_ids begin anew within a sequence of {s} tokens, which is several documents packed, "
                f"and attention in {type(task.model).__name__} is not causal within each document: its mask hides "
                f"{int(hidden.sum())} pairs of a query and a key per head, and {int((~wanted).sum())} would be. What "
                "works: a model that masks by position_ids, as mk.models.PackedGPT and decoders of transformers do "
                "with attn_implementation='sdpa'; position_ids that go on through the whole sequence, if tokens are to "
                f"attend to earlier documents; or {call_of(plan, {'cp': 1, 'cp_method': 'ring'})}."
            )
    return None


class _Masks(TorchFunctionMode):
    """A mode that records what attentions hide.

    Attributes:
        hidden: by call, [1, heads or 1, queries, keys].
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle one call of a torch function."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            given = dict(zip(names, args, strict=False)) | kwargs
            shape = (given["query"].shape[-2], given["key"].shape[-2])
            mask = given.get("attn_mask")
            if mask is None:
                hidden = (
                    torch.ones(shape, dtype=torch.bool).triu_(1)
                    if given.get("is_causal")
                    else torch.zeros(shape) > 0
                )
            else:
                hidden = ~mask if mask.dtype == torch.bool else mask < torch.finfo(mask.dtype).min / 2
            self.hidden.append(hidden.reshape(1, -1, *shape))
        return func(*args, **kwargs)
