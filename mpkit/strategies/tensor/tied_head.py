"""The layer that makes logits, and the embeddings that share its weight: all are divided by vocabulary, or none."""

from __future__ import annotations

from torch import nn

from mpkit.strategies.tensor.region import is_linear

__all__ = ["find_head"]

HEAD_NAMES = ("lm_head", "embed_out", "output_projection")


def find_head(model: nn.Module, embeddings: list[str]) -> tuple[str | None, list[str]]:
    """Return the head, and the embeddings to divide with it.

    If something else shares the head's weight and cannot be divided by vocabulary, all of them stay whole.

    Args:
        embeddings: the embeddings that are known so far.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, head in modules.items():
        if name.rpartition(".")[2] not in HEAD_NAMES or not is_linear(head):
            continue
        tied = {other: one for other, one in modules.items() if getattr(one, "weight", None) is head.weight}
        tied = {other: one for other, one in tied.items() if one is not head}
        if all(type(one).forward is nn.Embedding.forward for one in tied.values()):
            return name, list(dict.fromkeys([*embeddings, *tied]))
    return None, embeddings
