"""Embeddings whose options do not go together with several ranks."""

from __future__ import annotations

from torch import nn

__all__ = ["check_embeddings"]


def check_embeddings(model: nn.Module, *, shared: bool, local: bool = False) -> None:
    """Refuse embeddings that several ranks would not train as one process does.

    Args:
        model: the model.
        shared: whether ranks look up different rows of the same table, or hold parts of it.
        local: whether each rank computes the mean loss of its own samples.

    Raises:
        ValueError: there is one; the message names it.
    """
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        who = f"The model's {name or type(module).__name__}"
        where = f"model{'.get_submodule(' + repr(name) + ')' if name else ''}"
        if module.sparse:
            raise ValueError(
                f"{who} makes sparse gradients (sparse=True), and ranks keep, sum and send dense ones. The same "
                f"numbers without: {where}.sparse = False"
            )
        if shared and module.max_norm is not None:
            raise ValueError(
                f"{who} scales the rows that it looks up in its forward (max_norm={module.max_norm}), and each rank "
                f"would scale its own rows only. Without: {where}.max_norm = None; in a loop of your own, scale all "
                f"rows after a step: {where}.weight.data.renorm_(2, 0, {module.max_norm})"
            )
        if shared and local and module.scale_grad_by_freq:
            raise ValueError(
                f"{who} divides gradients by how often a row occurs in the batch (scale_grad_by_freq=True), and each "
                f"rank would count in its own part. Without: {where}.scale_grad_by_freq = False"
            )
