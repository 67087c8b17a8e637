"""Messages about a loss or a layer whose parts do not add up to the whole: the reason, and a line of code to paste."""

from __future__ import annotations

from typing import Any

from mpkit.common.exceptions import one_line
from mpkit.plan.plan import Plan

__all__ = ["for_layer", "for_loss", "for_masked", "for_model_loss", "for_untried"]

PAIR = "loss=lambda out, y: ((F.cross_entropy(out, y, reduction='none') * mask).sum(), mask.sum())"
MEAN = "loss=mk.mean_loss(lambda out, y: F.cross_entropy(out.flatten(0, -2), y.flatten()))"
WHOLE = "loss=mk.whole_batch_loss(your_loss)"
COUNTS = (
    "What works: let the loss return (total, count), which are added up over all parts, so that it is the sum of "
    "totals / the sum of counts"
)


def _parts(plan: Plan) -> str:
    parts = []
    if plan.microbatches > 1:
        parts.append(f"{plan.microbatches} micro-batches")
    if plan.dp > 1 and plan.data_parallel != "dp":
        parts.append(f"{plan.dp} replicas")
    if plan.cp > 1:
        parts.append(f"{plan.cp} parts of each sequence")
    if plan.dp > 1 and plan.data_parallel == "dp":
        parts.append(f"{plan.dp} ranks")
    return " and ".join(parts)


def _describe_difference(plan: Plan, whole: float, parts: float) -> str:
    return (
        f"{plan} computes a batch in parts ({_parts(plan)}), and this loss of a few samples of the first batch is "
        f"{whole:.6g}, but {parts:.6g} when put together from parts."
    )


def for_loss(plan: Plan, kind: str, whole: float, parts: float, samples: int) -> str:
    """Return the message for a loss that is wrong for the first samples, of one of the kinds of `kind_of`."""
    figures = _describe_difference(plan, whole, parts)
    if kind == "sum":
        return (
            f"The loss is a sum over the samples. {figures} mpkit weights each part by its share of the samples, which "
            "is right for a mean. Either the mean (reduction='mean', .mean()), or, for the gradients of the sum over a "
            f"batch of {samples}: loss=lambda out, y: (your_loss(out, y), len(y) / {samples})"
        )
    if kind == "mean":
        return (
            f"The loss is a mean over something else than samples: ignored targets (ignore_index), class weights or a "
            f"mask. {figures} {COUNTS}: {PAIR}. Around one of torch's losses mpkit does that itself: {MEAN}"
        )
    return (
        f"The loss needs the whole batch: it compares samples with each other, or is no mean of theirs (a contrastive "
        f"loss, .std(), a root of a mean). {figures} "
        + (
            f"What works: {WHOLE}, which gathers all samples on every rank"
            + (", with one micro-batch" if plan.microbatches > 1 else "")
            if plan.cp == 1
            else "What works: a plan with cp=1 and mk.whole_batch_loss(your_loss)"
        )
        + "; or Plan.serial()."
    )


def for_masked(plan: Plan, number: int | None, where: str) -> str:
    """Return the message for a loss that is wrong only because the data has targets that do not count."""
    kind = (
        f"leaves out targets of {number} (ignore_index={number})"
        if number is not None
        else "is a masked or weighted mean"
    )
    return (
        f"The loss {kind}, and {where}. {plan} computes a batch in parts ({_parts(plan)}), in which different numbers "
        f"of targets count: their means do not add up to the mean over the batch. {COUNTS}: {PAIR}. Around one of "
        f"torch's losses mpkit does that itself: {MEAN}"
    )


def for_model_loss(plan: Plan, number: int | None, why: str) -> str:
    """Return the message for a loss that the model computes itself."""
    return (
        f"The loss is computed within the model, and {why}. {plan} computes a batch in parts ({_parts(plan)}), in "
        f"which different numbers of targets count (ignore_index={-100 if number is None else number}), so that the "
        "parts' means do not add up to the mean over the batch. What works: give the labels as targets, and compute "
        "the loss from the logits: data=[(inputs, labels)], loss=mk.mean_loss(lambda out, y: "
        "F.cross_entropy(out.logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())) for a causal language model; without "
        "the shift for others."
    )


def for_untried(plan: Plan, number: int | None, batch: int, error: Exception) -> str:
    """Return the warning for data whose masked targets the loss refused when it was tried."""
    such = "a mask or weights" if number is None else f"targets of {number}"
    return (
        f"data[{batch}] has {such}, different ones for each sample, and the loss of such data could not be compared "
        f"with that of its parts: tried on a few samples it raises {one_line(error)}. {plan} computes a batch in parts "
        f"({_parts(plan)}). If the loss is a mean over what is not masked, let it return (total, count): {PAIR}"
    )


def for_layer(plan: Plan, model: Any, name: str | None, parameters: list[str]) -> str:
    """Return the message for a model with a layer that mixes the samples of a batch."""
    if name is None:
        which = f"The gradient of {parameters[0]}" if parameters else "The model"
        what = f"{which} depends on which samples are computed together (a hook or a backward of its own?)"
    else:
        kind = type(model.get_submodule(name)).__name__
        where = f"The layer {name!r} ({kind})" if name else f"The model ({kind}), outside of its layers,"
        what = f"{where} makes something else of a sample when other samples are computed with it"
    m, n = plan.microbatches, plan.dp
    instead = "Plan.serial()" if n > 1 or m > 1 else "cp=1"
    if plan.pp > 1 and n == 1:
        instead = f"Plan.naive_mp({plan.pp}), one micro-batch on {plan.pp} ranks, or Plan.serial()"
    if plan.tp > 1 and m == 1:
        instead = f"Plan.tp({plan.tp}), or Plan.serial()"
    if not name:
        instead += (
            ". Where it compares samples, as CLIP does: let the model return what it makes of each (embeddings), and "
            "compare them in loss=mk.whole_batch_loss(lambda out, y: ...)"
        )
    return (
        f"{what}: a mean over the batch, a permutation of it, its length, or statistics of it. {plan} computes a batch "
        f"in parts ({_parts(plan)}), so training would not be that of the whole batch. What works: a layer that sees "
        f"each sample by itself (LayerNorm, GroupNorm), torch's BatchNorm, which mpkit synchronizes, or {instead}."
    )
