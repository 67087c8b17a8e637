"""From a TensorPlan's patterns to a model's own layers, with errors for what t ranks cannot divide.

Nothing here needs a rank: the parent process checks before any rank starts.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, TypeAlias

from torch import nn

from mpkit.plan.tensor_plan import Region, TensorPlan
from mpkit.strategies.stage.shard import evenly
from mpkit.strategies.tensor.region import is_across, is_linear, is_weight

Names: TypeAlias = dict[str, Any]
"""A model's modules and parameters, by name."""


def check(model: nn.Module, t: int, plan: TensorPlan, *, sequence: bool = False) -> TensorPlan:
    """Return the plan with the model's own names and numbers instead of patterns and attributes.

    >>> from mpkit.models import GPT
    >>> from mpkit.strategies.tensor import find_tensor_plan
    >>> model = GPT(layers=2)
    >>> found = check(model, 2, find_tensor_plan(model))
    >>> found.regions[1].entry, found.regions[1].heads
    ('block1.attention', 4)

    Raises:
        ValueError: a module does not exist, or cannot be divided because of its kind; t is larger than what there is to
            divide; or the plan does not say where the sequence is divided.
    """
    if sequence and plan.sequence is None:
        raise ValueError(
            "Sequence parallelism, and the model's TensorPlan does not say between which modules: "
            "TensorPlan(..., sequence=('first module to work on a part of the sequence', 'last one'))"
        )
    names: Names = dict(model.named_modules())
    names |= dict(model.named_parameters(remove_duplicate=False))
    regions = tuple(
        one for region in plan.regions for one in _expand(region, names) if _is_wide(one, names, t)
    )
    embeddings = tuple(name for pattern in plan.embeddings for name, _ in _match_modules(pattern, names))
    named = [plan.head] if plan.head else []
    for name in (*named, *(plan.sequence or ())):
        _get(names, name)
    # ---- can each be divided over t?
    for region in regions:
        _check_free((*region.column, region.row), names)
    _check_free((*embeddings, plan.head), names)
    for region in regions:
        _check_region(region, names, t)
    for name in embeddings:
        _check_embedding(name, names[name], t)
    if plan.head is not None:
        if not is_linear(names[plan.head]):
            raise ValueError(f"head={plan.head!r} is a {_kind(names[plan.head])}: the head is a linear layer")
        _enough(widths(names[plan.head])[1], t, f"{plan.head} has", "tokens in its vocabulary")
    return TensorPlan(regions, embeddings, plan.head, plan.sequence)


def divide(
    width: int, t: int, heads: int | None, sections: tuple[int, ...] = (1,)
) -> list[tuple[range, ...]]:
    """Return each rank's part of a layer's features: each section in whole heads, or evenly.

    >>> divide(12, 2, heads=3)
    [(range(0, 8),), (range(8, 12),)]
    >>> divide(12, 2, None, (1, 1, 1))[1]
    (range(2, 4), range(6, 8), range(10, 12))
    """
    ratio = width // sum(sections)
    ranges: list[list[range]] = [[] for _ in range(t)]
    start = 0
    for size in (ratio * share for share in sections):
        unit = size // heads if heads else 1
        for rank, part in enumerate(evenly(size // unit, t)):
            ranges[rank].append(range(start + part.start * unit, start + part.stop * unit))
        start += size
    return [tuple(parts) for parts in ranges]


def widths(layer: nn.Module | nn.Parameter) -> tuple[int, int]:
    """Return the number of inputs and outputs of a layer or of a parameter [..., outputs, inputs]."""
    if isinstance(layer, nn.Parameter):
        return layer.shape[-1], layer.shape[-2]
    weight: Any = layer.weight
    a, b = weight.shape[:2]
    return (a, b) if is_across(layer) else (b, a)


# ---- names --------------------------------------------------------------------------------------------------


def _match_modules(pattern: str, names: Names) -> list[tuple[str, tuple[str, ...]]]:
    """Return the modules that match a pattern, each with the text of each `*`."""
    if "*" not in pattern:
        _get(names, pattern)
        return [(pattern, ())]
    shape = re.compile(re.escape(pattern).replace(r"\*", "([^.]*)"))
    matching = [
        (name, match.groups())
        for name, one in names.items()
        if isinstance(one, nn.Module) and (match := shape.fullmatch(name))
    ]
    if not matching:
        _get(names, pattern)
    return matching


def _expand(region: Region, names: Names) -> Iterator[Region]:
    """Yield one region for each module that the region's entry matches."""
    for entry, stars in _match_modules(region.entry, names):
        column = tuple(_fill(name, stars, region, names) for name in region.column)
        if region.row is None:  # gathered, each layer by itself: any division works
            yield Region(entry, column)
            continue
        heads = region.heads
        if isinstance(heads, str):
            heads = _attribute(names[entry], entry, heads)
        row = _fill(region.row, stars, region, names)
        # Not every layer has one: only the first has a relative position bias.
        per_head = tuple(
            each for name in region.per_head if (each := _fill_name(name, stars, region)) in names
        )
        yield replace(region, entry=entry, column=column, row=row, heads=heads, per_head=per_head)


def _fill(pattern: str, stars: tuple[str, ...], region: Region, names: Names) -> str:
    """Return the name with the entry's `*` filled in, after checking that the model has it."""
    name = _fill_name(pattern, stars, region)
    _get(names, name)
    return name


def _fill_name(pattern: str, stars: tuple[str, ...], region: Region) -> str:
    parts = pattern.split("*")
    if len(parts) > len(stars) + 1:
        raise ValueError(
            f"Region(entry={region.entry!r}): {pattern!r} has more * than the entry, which says what they stand for: "
            "give one Region for each"
        )
    return "".join(part + star for part, star in zip(parts, (*stars[: len(parts) - 1], ""), strict=True))


def _get(names: Names, name: str) -> Any:
    if name in names:
        return names[name]
    near = get_close_matches(name, names, 3, 0.5)
    hint = f" It has {', '.join(map(repr, near))}." if near else ""
    raise ValueError(
        f"TensorPlan: the model has no module of the name {name!r}.{hint} All names: "
        "[name for name, _ in model.named_modules()]"
    )


def _attribute(module: nn.Module, name: str, path: str) -> int:
    value: object = module
    for part in path.split("."):
        value = getattr(value, part, None)
    if not isinstance(value, int) or value < 1:
        raise ValueError(
            f"Region(entry={name!r}, heads={path!r}): the number of heads is to be read there, and it is {value!r}. "
            f"The number itself may be given too, heads=12"
        )
    return value


# ---- numbers ------------------------------------------------------------------------------------------------


def _is_wide(region: Region, names: Names, t: int) -> bool:
    """Return whether to divide a region: without a row, and with fewer outputs than ranks, it stays whole."""
    layers = [names[name] for name in region.column]
    return region.row is not None or not any(is_linear(layer) and widths(layer)[1] < t for layer in layers)


def _check_free(layers: tuple[str | None, ...], names: Names) -> None:
    """Check that no layer's forward has been replaced."""
    for name in layers:
        if name is not None and "forward" in vars(names[name]):
            raise ValueError(
                f"{name or 'the model'}: its forward has been replaced on the instance, so that what it computes is "
                "not known; by sharding it, perhaps, which can be done once: start from copy.deepcopy(model)"
            )


def _check_region(region: Region, names: Names, t: int) -> None:
    where = f"Region(entry={region.entry!r})"
    heads = region.heads
    assert heads is None or isinstance(heads, int)
    if heads is not None:
        _enough(heads, t, f"{region.entry} has", "heads (or groups of heads, where some share a key)")

    def whole_heads(name: str, count: int, what: str, sections: int = 1) -> None:
        share = sections * (heads or 1)
        if count % share:
            raise ValueError(
                f"{where}: {name} has {count} {what}, which {heads or 'no'} heads and sections="
                f"{region.sections} do not make: {count} is no multiple of {share}"
            )

    for name in region.column:
        layer = names[name]
        matches_row = is_weight(layer) == is_weight(names.get(region.row or ""))
        if not (is_linear(layer) or is_weight(layer)) or not matches_row:
            raise ValueError(
                f"{where}: {name} is a {_kind(layer)}, and what is divided by columns is a linear layer"
            )
        outputs = widths(layer)[1]
        whole_heads(name, outputs, "outputs", sum(region.sections))
        _enough(outputs // sum(region.sections) * min(region.sections), t, f"{name} has", "outputs")
    for name in region.local:
        count = getattr(names[region.entry], name, None)
        if not isinstance(count, int) or count % (heads or 1):
            raise ValueError(
                f"{where}: local={region.local} are numbers that {heads or 'no'} heads divide, and {name} is {count!r}"
            )
    if region.row is not None:
        layer = names[region.row]
        if not is_linear(layer) and not is_weight(layer):
            raise ValueError(
                f"{where}: {region.row} is a {_kind(layer)}: what is divided by rows is a linear layer"
            )
        whole_heads(region.row, widths(layer)[0], "inputs")
    for name in region.per_head:
        whole_heads(name, names[name].shape[-1], "in its last dimension")


def _check_embedding(name: str, layer: nn.Module, t: int) -> None:
    if type(layer).forward is not nn.Embedding.forward:
        raise ValueError(
            f"embeddings={name!r} is a {_kind(layer)}: an nn.Embedding has a vocabulary to divide"
        )
    if layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq:
        raise ValueError(
            f"embeddings={name!r}: max_norm, sparse and scale_grad_by_freq look at the whole vocabulary; leave this "
            "one out of the TensorPlan's embeddings, or make it without them"
        )
    _enough(layer.num_embeddings, t, f"{name} has", "tokens")


def _enough(count: int, t: int, who: str, what: str) -> None:
    if t > count:
        raise ValueError(
            f"tp={t}: {who} {count} {what}, and each rank takes at least one: tp={count} is the most that works"
        )


def _kind(layer: nn.Module) -> str:
    return type(layer).__name__
