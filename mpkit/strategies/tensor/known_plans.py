"""Tensor plans of known models, and of chains of linear layers.

    known    blocks by the name of their class, anywhere in the model (`blocks.toml`)
    own      the plan that a transformers model brings with it (see below)
    pairs    Linear, activation, Linear in an nn.Sequential, such as the kit's MLP: column and row
    alone    layers without a partner: a column layer whose output is gathered

For an unknown model, the error shows a plan to paste.

The styles of a transformers model's own plan (transformers is not imported):

    colwise, packed_colwise        a column layer; the packed one has two sections, such as gate and up
    rowwise                        the row layer of the same module: one region with its column layers
    colwise_gather_output          a column layer whose outputs are gathered; the head's stay divided
    rowwise_split_input            follows such a layer and stays whole: every rank has the whole input
    moe_tp_experts                 a module whose parameters are divided, and whose outputs are partial sums
    replicated_with_grad_allreduce whole, but used on this rank's heads: its gradients are summed
    embedding_rowwise              an embedding with a divided vocabulary

Source: transformers, `base_model_tp_plan` of a config and `_tp_plan` of a model.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from mpkit.plan.tensor_plan import Region, TensorPlan
from mpkit.strategies.models.chain import is_chain, layers_of
from mpkit.strategies.models.networks import Hidden
from mpkit.strategies.tensor.region import is_linear

ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU,
    nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softsign, nn.LogSigmoid, nn.Identity, nn.Dropout,
    nn.AlphaDropout,
)  # fmt: skip
"""Modules that may stand between a column layer and a row layer: elementwise, and without parameters."""


class KnownClasses(NamedTuple):
    """Regions, embeddings, heads and the ends of a divided sequence, by the name of a class."""

    blocks: dict[str, list[Region]]
    embeddings: dict[str, str]
    heads: dict[str, str]
    sequences: dict[str, list[str]]


@cache
def known_classes() -> KnownClasses:
    """Read `blocks.toml`."""
    table: Any = tomllib.loads(Path(__file__).with_name("blocks.toml").read_text("utf-8"))
    blocks = {kind: list(map(_region, each["regions"])) for each in table["block"] for kind in each["of"]}
    return KnownClasses(blocks, table["embeddings"], table["heads"], table["sequences"])


def _region(fields: dict[str, Any]) -> Region:
    values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in fields.items()}
    return Region(**values)


def find_tensor_plan(model: nn.Module) -> TensorPlan:
    """Return the tensor plan of a known model.

    >>> from mpkit.models import MLP
    >>> find_tensor_plan(MLP(2, 3, layers=2)).regions[0]
    Region(entry='hidden0.linear', column=('hidden0.linear',), row='hidden1.linear', ...)

    Raises:
        ValueError: the model is unknown; the message has a TensorPlan of its linear layers, to paste.
    """
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    known, regions = known_classes(), list[Region]()
    embeddings: list[str] = []
    head: str | None = None
    sequence: tuple[str, str] | None = None
    for name, module in modules.items():
        kinds = _kinds(module)
        # ---- known
        for kind in kinds:
            here = (_region_below(name, region) for region in known.blocks.get(kind, ()))
            # An MLP, or experts in its place.
            regions += [each for each in here if each.column[0] in modules or each.column[0] in parameters]
            if kind in known.embeddings:
                embeddings.append(_join(name, known.embeddings[kind]))
            if kind in known.heads:
                head = _join(name, known.heads[kind])
            if kind in known.sequences:
                first, last = known.sequences[kind]
                sequence = (_join(name, _in_list(module, first)), _join(name, _in_list(module, last)))
    # ---- own
    if regions and head is None:
        head, embeddings = find_head(model, embeddings)
    if not regions and (own := own_plan(model)) is not None:
        return replace(own, regions=tuple(_with_stars(list(own.regions), list(modules))))
    # ---- pairs
    if not regions:
        regions = list(_pairs(model)) + list(_alone(model))
    regions = _with_stars(regions, list(modules))
    if not regions:
        raise ValueError(_unknown(model))
    return TensorPlan(tuple(regions), tuple(embeddings), head, sequence)


# ---- known --------------------------------------------------------------------------------------------------


def _kinds(module: nn.Module) -> list[str]:
    """Return the names of a module's class and its bases, without and with the module that defines them."""
    classes = [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module)]
    return [name for kind in classes for name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _region_below(prefix: str, region: Region) -> Region:
    """Return a block's region with the model's names."""
    column = tuple(_join(prefix, name) for name in region.column)
    row = None if region.row is None else _join(prefix, region.row)
    per_head = tuple(_join(prefix, name) for name in region.per_head)
    entry = _join(prefix, region.entry).rstrip(".")
    return replace(region, entry=entry, column=column, row=row, per_head=per_head)


def _in_list(module: nn.Module, name: str) -> str:
    """Replace -1 by the number of the last module in the list."""
    path, _, last = name.rpartition(".")
    return f"{path}.{len(list(module.get_submodule(path).children())) - 1}" if last == "-1" else name


def _with_stars(regions: list[Region], names: list[str]) -> list[Region]:
    """Merge the regions of equal layers into one with `*`."""
    alike: dict[Region, list[Region]] = {}
    for region in regions:
        alike.setdefault(_star_names(region), []).append(region)
    merged: list[Region] = []
    for starred, ones in alike.items():
        shape = re.compile(re.escape(starred.entry).replace(r"\*", "[^.]*"))
        described = {name for name in names if shape.fullmatch(name)}
        merged += [starred] if len(ones) > 1 and described == {one.entry for one in ones} else ones
    return merged


def _star_names(region: Region) -> Region:
    """Replace the number of the layer by `*`, if all of the region's names contain it."""
    layer = re.match(r"(?:[^.]*?\.)*?[^.]*?(\d+)(?=\.|$)", region.entry)
    rows = () if region.row is None else (region.row,)
    names = (region.entry, *region.column, *rows, *region.per_head)
    if layer is None or not all(f"{name}.".startswith(f"{layer[0]}.") for name in names):
        return region
    star = f"{layer[0].removesuffix(layer[1])}*"
    new = {name: star + name.removeprefix(layer[0]) for name in names}
    column, per_head = (tuple(new[name] for name in each) for each in (region.column, region.per_head))
    row = None if region.row is None else new[region.row]
    return replace(region, entry=new[region.entry], column=column, row=row, per_head=per_head)


# ---- pairs, and layers alone --------------------------------------------------------------------------------


def _pairs(model: nn.Module) -> Iterator[Region]:
    """Yield a region for each Linear, activation, Linear."""
    for steps in _chains(model):
        first: str | None = None
        for name, layer in steps:
            if is_linear(layer):
                if first is not None:
                    yield Region(first, (first,), name)
                first = name if first is None else None
            elif not isinstance(layer, ELEMENTWISE):
                first = None


def _alone(model: nn.Module) -> Iterator[Region]:
    """Yield a region for each layer of a chain that has no partner."""
    paired = {name for region in _pairs(model) for name in (*region.column, region.row)}
    for name, layer in (step for chain in _chains(model) for step in chain):
        if name not in paired and is_linear(layer):
            yield Region(name, (name,))


def _chains(model: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """Yield the chains in a model, each as its steps with their names."""
    inside: set[str] = set()
    for name, module in model.named_modules():
        if is_linear(module) and not name:
            yield [("", module)]
        if not is_chain(module) or name in inside:
            continue
        steps: list[tuple[str, nn.Module]] = []
        inside.update(_join(name, inner) for inner, _ in module.named_modules())
        for inner, layer in layers_of(module) if len(list(module.children())) else []:
            path = _join(name, inner)
            if isinstance(layer, Hidden):  # a linear layer, and its activation
                steps += [(f"{path}.linear", layer.linear), (path, nn.GELU())]
            else:
                steps.append((path, layer))
        yield steps


# ---- unknown ------------------------------------------------------------------------------------------------


def _unknown(model: nn.Module) -> str:
    names = {name: module for name, module in model.named_modules() if name}
    layers = [name for name, layer in names.items() if is_linear(layer)]
    kind = type(model).__name__
    known = (
        "the kit's models, transformers' models that bring a plan along (Llama, Mistral, Qwen, Gemma...), its GPT-2, "
        "GPT-J, OPT, Falcon, BERT, T5, BART and Whisper, and nn.Sequential chains"
    )
    if not layers:
        return f"Tensor parallelism divides linear layers, and {kind} has none. What is known by itself: {known}."
    # A layer that shares its weight with embeddings is a head.
    vocabulary = {id(layer.weight): name for name, layer in names.items() if isinstance(layer, nn.Embedding)}
    heads = [name for name in layers if id(names[name].weight) in vocabulary]
    regions = _with_stars([Region(name, (name,)) for name in layers if name not in heads], list(names))
    lines = "".join(f"    mk.tensor.Region({one.entry!r}, column=({one.column[0]!r},)),\n" for one in regions)
    more = ""
    if heads:
        weight = names[heads[0]].weight
        tied = [n for n, layer in names.items() if isinstance(layer, nn.Embedding) and layer.weight is weight]
        more = f", head={heads[0]!r}, embeddings={tuple(tied)!r}"
    return (
        f"No TensorPlan is known for {kind}, only for {known}. This one divides each of its linear layers by outputs, "
        f"and gathers these, which is right and slow:\nmk.tensor.TensorPlan((\n{lines}){more})\n"
        "Where one layer's outputs go, feature by feature, to another one, make the two a region, "
        "mk.tensor.Region(entry, column=(first,), row=second), and nothing is gathered in between; "
        "an attention is divided by heads=."
    )


COLUMN = {"colwise": (1,), "packed_colwise": (1, 1)}  # the sections of a column layer, by its style
KNOWN = {
    *COLUMN, "rowwise", "colwise_gather_output", "rowwise_split_input", "moe_tp_experts", "embedding_rowwise",
    "replicated_with_grad_allreduce",
}  # fmt: skip
# Attributes in which an attention may say how many heads can be divided.
HEAD_COUNTS = ("config.num_key_value_heads", "config.num_attention_heads", "num_key_value_heads", "num_heads")


def own_plan(model: nn.Module) -> TensorPlan | None:
    """Return the plan of the outermost module that has one, with the model's names; None if none divides layers."""
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
            raise _cannot_follow(f"says {style!r} of {key!r}, which cannot be executed here")
        shape = re.compile(re.escape(_join(prefix, key)).replace(r"\*", r"\d+"))
        styles |= {name: style for name in names if shape.fullmatch(name)}
    return styles


def _is_own(model: nn.Module, layer: str, head: str | None) -> bool:
    """Return whether a layer can be divided: only the head, if that is divided too, may share its weight."""
    weight = model.get_submodule(layer).weight
    sharing = [n for n, module in model.named_modules() if getattr(module, "weight", None) is weight]
    return all(name in (layer, head) for name in sharing)


def _regions(
    entry: str, leaves: dict[str, str], modules: dict[str, nn.Module], styles: dict[str, str]
) -> list[Region]:
    of = {style: [f"{entry}.{leaf}" for leaf, one in leaves.items() if one == style] for style in KNOWN}
    gathered = [Region(name, (name,)) for name in of["colwise_gather_output"]]
    columns, rows = [name for style in COLUMN for name in of[style]], of["rowwise"]
    if not columns and not rows:
        return gathered
    sections = {COLUMN[style] for style in COLUMN if of[style]}
    if len(rows) != 1 or len(sections) != 1:
        raise _cannot_follow(
            f"divides {', '.join(columns) or 'nothing'} by columns and {', '.join(rows) or 'nothing'} by rows within "
            f"{entry}, which makes no region of column layers and one row layer"
        )
    module = modules[entry]
    _check_whole(entry, module, styles)
    attends = "attention" in type(module).__name__.lower() or hasattr(module, "head_dim")
    heads = _heads(module) if attends else None
    inputs = ("top_k_weights",) if styles.get(entry) == "moe_tp_experts" else ()
    return [*gathered, Region(entry, tuple(columns), rows[0], heads, sections.pop(), inputs=inputs)]


def _heads(module: nn.Module) -> str | None:
    """Return the path of the number of heads, or of groups of heads that share a key."""
    for path in HEAD_COUNTS:
        value: Any = module
        for part in path.split("."):
            value = getattr(value, part, None)
        if isinstance(value, int):
            return path
    return None


def _check_whole(entry: str, module: nn.Module, styles: dict[str, str]) -> None:
    """Check that every parameter within a region has a style, which says whether its gradients are partial sums."""
    named = styles.keys() if styles.get(entry) == "moe_tp_experts" else styles.keys() - {entry}
    for name, _ in module.named_parameters(prefix=entry):
        if not named & {name, name.rpartition(".")[0]}:
            raise _cannot_follow(f"divides layers of {entry} and does not say what becomes of {name}")


def _cannot_follow(why: str) -> ValueError:
    return ValueError(
        f"The plan that the model brings along, its _tp_plan, {why}: name the layers to divide yourself, "
        "mk.Plan(tensor=mk.tensor.TensorPlan((mk.tensor.Region(entry, column=(...), row=...),))), or train without tp"
    )


HEAD_NAMES = ("lm_head", "embed_out", "output_projection")


def find_head(model: nn.Module, embeddings: list[str]) -> tuple[str | None, list[str]]:
    """Return the head, and the embeddings to divide with it; none if its weight has another, indivisible user."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, head in modules.items():
        if name.rpartition(".")[2] not in HEAD_NAMES or not is_linear(head):
            continue
        tied = {other: one for other, one in modules.items() if getattr(one, "weight", None) is head.weight}
        tied = {other: one for other, one in tied.items() if one is not head}
        if all(type(one).forward is nn.Embedding.forward for one in tied.values()):
            return name, list(dict.fromkeys([*embeddings, *tied]))
    return None, embeddings
