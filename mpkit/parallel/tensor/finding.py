"""Tensor plans of models that are known by name, and of chains of linear layers.

    known    the blocks of the kit's GPT and of transformers' GPT-2, Llama and BERT, by the name of their class,
             wherever in the model they are; transformers is not imported
    pairs    Linear, activation, Linear in an nn.Sequential, such as the kit's MLP: column and row
    alone    what has no partner: a column layer whose output is gathered

A model of which nothing is known gets a plan to paste.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from mpkit.models.chain import is_chain, layers_of
from mpkit.parallel.tensor.region import has_outputs, is_linear
from mpkit.tensor_plan import Region, TensorPlan

__all__ = ["find_tensor_plan"]

BLOCKS = {
    "mpkit.models.gpt.Block": (
        Region("attention", ("attention.qkv",), "attention.out", "heads", (1, 1, 1), ("heads",)),
        Region("mlp", ("mlp.up",), "mlp.out"),
    ),
    "GPT2Block": (
        Region("attn", ("attn.c_attn",), "attn.c_proj", "num_heads", (1, 1, 1), ("num_heads", "split_size")),
        Region("mlp", ("mlp.c_fc",), "mlp.c_proj"),
    ),
    "LlamaDecoderLayer": (
        Region(
            "self_attn",
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "self_attn.o_proj",
            "config.num_key_value_heads",
        ),
        Region("mlp", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
    ),
    "BertLayer": (
        Region(
            "attention.self",
            ("attention.self.query", "attention.self.key", "attention.self.value"),
            "attention.output.dense",
            "num_attention_heads",
            local=("num_attention_heads", "all_head_size"),
        ),
        Region("intermediate", ("intermediate.dense",), "output.dense"),
    ),
}
"""Regions of a block, by its class."""

EMBEDDINGS = {
    "mpkit.models.gpt.Embedding": "tokens",
    "GPT2Model": "wte",
    "LlamaModel": "embed_tokens",
    "BertEmbeddings": "word_embeddings",
}
HEADS = {
    "mpkit.models.gpt.Head": "logits",
    "GPT2LMHeadModel": "lm_head",
    "GPT2DoubleHeadsModel": "lm_head",
    "LlamaForCausalLM": "lm_head",
    "BertLMPredictionHead": "decoder",
}
SEQUENCES = {
    "mpkit.models.gpt.GPT": ("block0", "head.norm"),
    "GPT2Model": ("h.0", "ln_f"),
    "LlamaModel": ("layers.0", "norm"),
    "BertEncoder": ("layer.0", "layer.-1"),
}
"""The first module on a part of the sequence, and the last; -1: the last of its list."""

GATHERED = {
    "mpkit.models.convnet.ConvNet",
    "mpkit.models.resnet.ResNet",
    "mpkit.models.unet.UNet",
}
"""Models whose layers are divided one by one, their outputs gathered."""

ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU,
    nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softsign, nn.LogSigmoid, nn.Identity, nn.Dropout,
    nn.AlphaDropout,
)  # fmt: skip
"""What may stand between a column layer and a row layer: each feature by itself, and no parameters."""


def find_tensor_plan(model: nn.Module) -> TensorPlan:
    """How to divide a model that is known.

    >>> from mpkit.models import MLP
    >>> find_tensor_plan(MLP(2, 3, layers=2)).regions[0]
    Region(entry='hidden0.linear', column=('hidden0.linear',), row='hidden1.linear', ...)

    Raises:
        ValueError: it is not; with a TensorPlan of its linear layers, to paste.
    """
    modules = dict(model.named_modules())
    regions: list[Region] = []
    embeddings: list[str] = []
    head: str | None = None
    sequence: tuple[str, str] | None = None
    for name, module in modules.items():
        kinds = _kinds(module)
        # ---- known
        for kind in kinds:
            regions += [_below(name, region) for region in BLOCKS.get(kind, ())]
            if kind in EMBEDDINGS:
                embeddings.append(_join(name, EMBEDDINGS[kind]))
            if kind in HEADS:
                head = _join(name, HEADS[kind])
            if kind in SEQUENCES:
                first, last = (_join(name, _in_list(module, end)) for end in SEQUENCES[kind])
                sequence = (first, last)
    # ---- pairs
    if not regions:
        regions = list(_pairs(model)) + list(_alone(model))
    regions = _with_stars(regions, list(modules))
    if not regions:
        raise ValueError(_unknown(model))
    return TensorPlan(tuple(regions), tuple(embeddings), head, sequence)


# ---- known --------------------------------------------------------------------------------------------------


def _kinds(module: nn.Module) -> list[str]:
    """The names of a module's class and of those that it is made from: alone, and with their module."""
    classes = [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module)]
    return [name for kind in classes for name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _below(prefix: str, region: Region) -> Region:
    """A block's region, by the model's names."""
    column = tuple(_join(prefix, name) for name in region.column)
    row = None if region.row is None else _join(prefix, region.row)
    return replace(region, entry=_join(prefix, region.entry), column=column, row=row)


def _in_list(module: nn.Module, name: str) -> str:
    """The last of a list, where -1 says so."""
    path, _, last = name.rpartition(".")
    return f"{path}.{len(list(module.get_submodule(path).children())) - 1}" if last == "-1" else name


def _with_stars(regions: list[Region], names: list[str]) -> list[Region]:
    """The same, with one region for all layers that are alike."""
    alike: dict[Region, list[Region]] = {}
    for region in regions:
        alike.setdefault(_starred(region), []).append(region)
    found: list[Region] = []
    for starred, ones in alike.items():
        shape = re.compile(re.escape(starred.entry).replace(r"\*", "[^.]*"))
        described = {name for name in names if shape.fullmatch(name)}
        found += [starred] if len(ones) > 1 and described == {one.entry for one in ones} else ones
    return found


def _starred(region: Region) -> Region:
    """With `*` for the number of the layer, if all names have it."""
    layer = re.match(r"(?:[^.]*?\.)*?[^.]*?(\d+)(?=\.|$)", region.entry)
    if layer is None:
        return region
    prefix, star = layer[0], f"{layer[0].removesuffix(layer[1])}*"
    names = [region.entry, *region.column, *([region.row] if region.row is not None else [])]
    if not all(f"{name}.".startswith(f"{prefix}.") for name in names):
        return region
    entry, *column = (star + name.removeprefix(prefix) for name in names)
    row = column.pop() if region.row is not None else None
    return replace(region, entry=entry, column=tuple(column), row=row)


# ---- pairs, and what is alone -------------------------------------------------------------------------------


def _pairs(model: nn.Module) -> Iterator[Region]:
    """Linear, activation, Linear."""
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
    """Layers of chains without a partner, and all layers of models that are divided so."""
    paired = {name for region in _pairs(model) for name in (*region.column, region.row)}
    steps = [step for chain in _chains(model) for step in chain]
    for kind in _kinds(model):
        steps += model.named_modules() if kind in GATHERED else ()
    for name, layer in dict(steps).items():
        if name not in paired and has_outputs(layer):
            yield Region(name, (name,))


def _chains(model: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """The chains in a model, the steps of each by their names."""
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
            if "mpkit.models.mlp.Hidden" in _kinds(layer):  # a linear layer, and its activation
                steps += [(f"{path}.linear", layer.linear), (path, nn.GELU())]  # type: ignore[list-item]
            else:
                steps.append((path, layer))
        yield steps


# ---- unknown ------------------------------------------------------------------------------------------------


def _unknown(model: nn.Module) -> str:
    names = {name: module for name, module in model.named_modules() if name}
    layers = [name for name, layer in names.items() if is_linear(layer)]
    kind = type(model).__name__
    known = "the kit's models, transformers' GPT-2, Llama and BERT, and nn.Sequential chains"
    if not layers:
        return f"Tensor parallelism divides linear layers, and {kind} has none. What is known by itself: {known}."
    # A layer that shares its weight with embeddings is a head.
    vocabulary = {id(layer.weight): name for name, layer in names.items() if isinstance(layer, nn.Embedding)}
    heads = [name for name in layers if id(names[name].weight) in vocabulary]
    regions = _with_stars([Region(name, (name,)) for name in layers if name not in heads], list(names))
    lines = "".join(f"    mk.Region({one.entry!r}, column=({one.column[0]!r},)),\n" for one in regions)
    more = ""
    if heads:
        weight = names[heads[0]].weight
        tied = [n for n, layer in names.items() if isinstance(layer, nn.Embedding) and layer.weight is weight]
        more = f", head={heads[0]!r}, embeddings={tuple(tied)!r}"
    return (
        f"No TensorPlan is known for {kind}, only for {known}. This one divides each of its linear layers by outputs, "
        "and gathers these, which is right and slow:\n"
        f"mk.TensorPlan((\n{lines}){more})\n"
        "Where one layer's outputs go, feature by feature, to another one, make the two a region, "
        "mk.Region(entry, column=(first,), row=second), and nothing is gathered in between; an attention is divided by "
        "heads=."
    )
