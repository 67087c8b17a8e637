"""The plan that a transformers model brings with it, as a TensorPlan; transformers is not imported.

    colwise, packed_colwise        a column layer; the packed one has two sections, such as gate and up
    rowwise                        the row layer of the same module: one region with its column layers
    colwise_gather_output          a column layer whose outputs are gathered; the head's stay divided
    rowwise_split_input            follows such a layer and stays whole: every rank has the whole input
    moe_tp_experts                 a module whose parameters are divided, and whose outputs are partial sums
    replicated_with_grad_allreduce whole, but used on this rank's heads: its gradients are summed
    embedding_rowwise              an embedding with a divided vocabulary

Source: transformers, `base_model_tp_plan` of a config and `_tp_plan` of a model.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from mpkit.plan.tensor_plan import Region, TensorPlan
from mpkit.strategies.tensor.region import is_linear

__all__ = ["find_head", "own_plan"]


COLUMN = {"colwise": (1,), "packed_colwise": (1, 1)}
"""The sections of a column layer, by its style."""
KNOWN = {
    *COLUMN, "rowwise", "colwise_gather_output", "rowwise_split_input", "moe_tp_experts", "embedding_rowwise",
    "replicated_with_grad_allreduce",
}  # fmt: skip
HEAD_COUNTS = (
    "config.num_key_value_heads", "config.num_attention_heads", "num_key_value_heads", "num_heads",
)  # fmt: skip
"""Attributes in which an attention may say how many heads can be divided."""


def own_plan(model: nn.Module) -> TensorPlan | None:
    """Return the plan of the outermost module that has one, with the model's names; None if none divides layers.

    Raises:
        ValueError: the plan has an entry that cannot be executed here.
    """
    for prefix, module in model.named_modules():
        plan = getattr(module, "_tp_plan", None)
        if isinstance(plan, dict) and any("*" in key for key in plan):
            return _translate(model, prefix, plan)
    return None


def _translate(model: nn.Module, prefix: str, plan: dict[str, str]) -> TensorPlan:
    modules = dict(model.named_modules())
    styles = _styles(model, prefix, plan)
    head, embeddings = find_head(model, [])
    for name, style in styles.items():
        plain = name in modules and type(modules[name]).forward is nn.Embedding.forward
        if style == "embedding_rowwise" and plain and _is_own(model, name, head):
            embeddings.append(name)
    groups: dict[str, dict[str, str]] = {}
    for name, style in styles.items():
        parent, _, leaf = name.rpartition(".")
        if style == "colwise_gather_output" and not _is_own(model, name, None):
            continue  # a head that shares its weight with an embedding that stays whole
        if name != head and style not in ("embedding_rowwise", "moe_tp_experts"):
            groups.setdefault(parent, {})[leaf] = style
    regions = [one for parent, leaves in groups.items() for one in _regions(parent, leaves, modules, styles)]
    return TensorPlan(tuple(regions), tuple(dict.fromkeys(embeddings)), head)


def _styles(model: nn.Module, prefix: str, plan: dict[str, str]) -> dict[str, str]:
    """Return the style of each module or parameter that the plan names."""
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    styles: dict[str, str] = {}
    for key, style in plan.items():
        if style not in KNOWN:
            raise ValueError(
                f"The plan that {type(model).__name__} brings along, its _tp_plan, says {style!r} of {key!r}, which "
                "cannot be executed here: name the layers to divide yourself, "
                "mk.Plan(tensor=mk.tensor.TensorPlan((mk.tensor.Region("
                "entry, column=(...), row=...),))), or train without tp"
            )
        shape = re.compile(re.escape(f"{prefix}.{key}" if prefix else key).replace(r"\*", r"\d+"))
        styles |= {name: style for name in names if shape.fullmatch(name)}
    return styles


def _is_own(model: nn.Module, layer: str, head: str | None) -> bool:
    """Return whether a layer can be divided: only the head may share its weight, where that is divided too."""
    weight = model.get_submodule(layer).weight
    sharing = [n for n, module in model.named_modules() if getattr(module, "weight", None) is weight]
    return all(name in (layer, head) for name in sharing)


def _regions(
    entry: str, leaves: dict[str, str], modules: dict[str, nn.Module], styles: dict[str, str]
) -> list[Region]:
    """Return the regions of one module."""
    of = {style: [f"{entry}.{leaf}" for leaf, one in leaves.items() if one == style] for style in KNOWN}
    gathered = [Region(name, (name,)) for name in of["colwise_gather_output"]]
    columns, rows = [name for style in COLUMN for name in of[style]], of["rowwise"]
    if not columns and not rows:
        return gathered
    sections = {COLUMN[style] for style in COLUMN if of[style]}
    if len(rows) != 1 or len(sections) != 1:
        raise ValueError(
            f"The plan that the model brings along, its _tp_plan, divides {', '.join(columns) or 'nothing'} by columns "
            f"and {', '.join(rows) or 'nothing'} by rows within {entry}, which makes no region of column layers and "
            "one row layer: name the layers to divide yourself, "
            "mk.Plan(tensor=mk.tensor.TensorPlan(...)), or train without tp"
        )
    module = modules[entry]
    _check_whole(entry, module, styles)
    heads = _heads(module) if _is_attention(module) else None
    routed = styles.get(entry) == "moe_tp_experts"
    inputs = ("top_k_weights",) if routed else ()
    return [*gathered, Region(entry, tuple(columns), rows[0], heads, sections.pop(), inputs=inputs)]


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() or hasattr(module, "head_dim")


def _heads(module: nn.Module) -> str | None:
    """Return the attribute that says how many heads, or groups of heads that share a key, there are."""
    for path in HEAD_COUNTS:
        value: Any = module
        for part in path.split("."):
            value = getattr(value, part, None)
        if isinstance(value, int):
            return path
    return None


def _check_whole(entry: str, module: nn.Module, styles: dict[str, str]) -> None:
    """Check that every parameter within a region has a style, which says whether its gradients are partial sums."""
    for name, _ in module.named_parameters(prefix=entry):
        layer = name.rpartition(".")[0]
        if not any(
            path in styles for path in (name, layer) if path != entry or styles.get(entry) == "moe_tp_experts"
        ):
            raise ValueError(
                f"The plan that the model brings along, its _tp_plan, divides layers of {entry} and does not say what "
                f"becomes of {name}: name the layers to divide yourself, "
                "mk.Plan(tensor=mk.tensor.TensorPlan(...)), or train "
                "without tp"
            )


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
