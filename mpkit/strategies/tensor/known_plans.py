"""Tensor plans of models that are known by name, and of chains of linear layers.

    known    blocks by the name of their class, wherever they are in the model (`known_blocks`)
    own      the plan that a transformers model brings with it (`transformers_plan`)
    pairs    Linear, activation, Linear in an nn.Sequential, such as the kit's MLP: column and row
    alone    layers without a partner: a column layer whose output is gathered

For an unknown model, the error shows a plan to paste.

The division of known models' blocks, by the names of their classes; transformers is not imported.

Only what a class's forward does matters here: which layers stand between an f and a g, which attributes count heads,
and which arguments carry gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from mpkit.plan.tensor_plan import Region, TensorPlan
from mpkit.strategies.models.chain import is_chain, layers_of
from mpkit.strategies.tensor.region import has_outputs, is_linear
from mpkit.strategies.tensor.transformers_plan import find_head, own_plan

__all__ = ["BLOCKS", "EMBEDDINGS", "HEADS", "SEQUENCES", "find_tensor_plan"]


SEQ2SEQ = ("Bart", "MBart", "Pegasus", "Marian", "Whisper")
"""Encoders and decoders with the same attention class, and with fc1 and fc2 in their layers."""


def _projections(entry: str, heads: str, out: str, local: tuple[str, ...] = ()) -> Region:
    """Return the region of an attention with q_proj, k_proj and v_proj."""
    q, k, v, row = (f"{entry}.{name}" if entry else name for name in ("q_proj", "k_proj", "v_proj", out))
    return Region(entry, (q, k, v), row, heads, local=local)


BLOCKS: dict[str, tuple[Region, ...]] = {
    "mpkit.strategies.models.gpt.Block": (
        Region("attention", ("attention.qkv",), "attention.out", "heads", (1, 1, 1), ("heads",)),
        Region("mlp", ("mlp.up",), "mlp.out"),
        Region("mlp.experts", ("mlp.experts.up",), "mlp.experts.down", inputs=("weights",)),
        Region("mlp.shared", ("mlp.shared.up",), "mlp.shared.down"),
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
    "OPTDecoderLayer": (
        _projections("self_attn", "num_heads", "out_proj", local=("num_heads",)),
        Region("fc1", ("fc1",), "fc2"),
    ),
    "GPTJBlock": (
        _projections("attn", "num_attention_heads", "out_proj", local=("num_attention_heads",)),
        Region("mlp", ("mlp.fc_in",), "mlp.fc_out"),
    ),
    "GPTNeoBlock": (
        _projections("attn.attention", "num_heads", "out_proj", local=("num_heads",)),
        Region("mlp", ("mlp.c_fc",), "mlp.c_proj"),
    ),
    "StableLmDecoderLayer": (
        _projections(
            "self_attn", "num_key_value_heads", "o_proj", local=("num_heads", "num_key_value_heads")
        ),
        Region("mlp", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
    ),
    "FalconDecoderLayer": (
        Region(
            "self_attention", ("self_attention.query_key_value",), "self_attention.dense", "num_kv_heads",
            local=("num_heads", "num_kv_heads"),
        ),
        Region("mlp", ("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h"),
    ),
    "GptOssDecoderLayer": (
        replace(
            _projections("self_attn", "config.num_key_value_heads", "o_proj"), per_head=("self_attn.sinks",)
        ),
    ),
    "T5Attention": (
        Region(
            "", ("q", "k", "v"), "o", "n_heads", local=("n_heads", "inner_dim"), inputs=("key_value_states",),
            apart=("position_bias",), per_head=("relative_attention_bias.weight",),
        ),
    ),
    "T5DenseActDense": (Region("", ("wi",), "wo"),),
    "T5DenseGatedActDense": (Region("", ("wi_0", "wi_1"), "wo"),),
    **{
        f"{name}Attention": (
            replace(
                _projections("", "num_heads", "out_proj", local=("num_heads",)), inputs=("key_value_states",)
            ),
        )
        for name in SEQ2SEQ
    },
    **{
        f"{name}{side}Layer": (Region("fc1", ("fc1",), "fc2"),)
        for name in SEQ2SEQ
        for side in ("Encoder", "Decoder")
    },
}  # fmt: skip
"""The regions of a block, by its class."""

EMBEDDINGS = {
    "mpkit.strategies.models.gpt.Embedding": "tokens",
    "GPT2Model": "wte",
    "LlamaModel": "embed_tokens",
    "BertEmbeddings": "word_embeddings",
}
HEADS = {
    "mpkit.strategies.models.gpt.Head": "logits",
    "GPT2LMHeadModel": "lm_head",
    "GPT2DoubleHeadsModel": "lm_head",
    "LlamaForCausalLM": "lm_head",
    "BertLMPredictionHead": "decoder",
}
SEQUENCES = {
    "mpkit.strategies.models.gpt.GPT": ("block0", "head.norm"),
    "GPT2Model": ("h.0", "ln_f"),
    "LlamaModel": ("layers.0", "norm"),
    "BertEncoder": ("layer.0", "layer.-1"),
}
"""The first and the last module that work on a part of the sequence; -1 stands for the last one of a list."""


GATHERED = {
    "mpkit.strategies.models.convnet.ConvNet",
    "mpkit.strategies.models.resnet.ResNet",
    "mpkit.strategies.models.unet.UNet",
}
"""Models whose layers are divided one by one, their outputs gathered."""

ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU,
    nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softsign, nn.LogSigmoid, nn.Identity, nn.Dropout,
    nn.AlphaDropout,
)  # fmt: skip
"""Modules that may stand between a column layer and a row layer: elementwise, and without parameters."""


def find_tensor_plan(model: nn.Module) -> TensorPlan:
    """Return the tensor plan of a known model.

    >>> from mpkit.models import MLP
    >>> find_tensor_plan(MLP(2, 3, layers=2)).regions[0]
    Region(entry='hidden0.linear', column=('hidden0.linear',), row='hidden1.linear', ...)

    Raises:
        ValueError: the model is unknown; the message has a TensorPlan of its linear layers, to paste.
    """
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    regions: list[Region] = []
    embeddings: list[str] = []
    head: str | None = None
    sequence: tuple[str, str] | None = None
    for name, module in modules.items():
        kinds = _kinds(module)
        # ---- known
        for kind in kinds:
            here = [_region_below(name, region) for region in BLOCKS.get(kind, ())]
            regions += [
                region for region in here if region.column[0] in modules or region.column[0] in parameters
            ]  # an MLP, or experts instead
            if kind in EMBEDDINGS:
                embeddings.append(_join(name, EMBEDDINGS[kind]))
            if kind in HEADS:
                head = _join(name, HEADS[kind])
            if kind in SEQUENCES:
                first, last = (_join(name, _in_list(module, end)) for end in SEQUENCES[kind])
                sequence = (first, last)
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
    """Return the names of a module's class and its base classes, without and with their module."""
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
    """Return the name with -1 replaced by the number of the last module in the list."""
    path, _, last = name.rpartition(".")
    return f"{path}.{len(list(module.get_submodule(path).children())) - 1}" if last == "-1" else name


def _with_stars(regions: list[Region], names: list[str]) -> list[Region]:
    """Return the regions, with those of equal layers merged into one with `*`."""
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
    """Return the region with `*` for the number of the layer, if all of its names contain that."""
    layer = re.match(r"(?:[^.]*?\.)*?[^.]*?(\d+)(?=\.|$)", region.entry)
    if layer is None:
        return region
    prefix, star = layer[0], f"{layer[0].removesuffix(layer[1])}*"
    names = [
        region.entry, *region.column, *([region.row] if region.row is not None else []), *region.per_head
    ]  # fmt: skip
    if not all(f"{name}.".startswith(f"{prefix}.") for name in names):
        return region
    entry, *others = (star + name.removeprefix(prefix) for name in names)
    column, others = others[: len(region.column)], others[len(region.column) :]
    row = others.pop(0) if region.row is not None else None
    return replace(region, entry=entry, column=tuple(column), row=row, per_head=tuple(others))


# ---- pairs, and what is alone -------------------------------------------------------------------------------


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
    """Yield a region for each layer of a chain that has no partner, and for all layers of models in `GATHERED`."""
    paired = {name for region in _pairs(model) for name in (*region.column, region.row)}
    steps = [step for chain in _chains(model) for step in chain]
    for kind in _kinds(model):
        steps += model.named_modules() if kind in GATHERED else ()
    for name, layer in dict(steps).items():
        if name not in paired and has_outputs(layer):
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
            if "mpkit.strategies.models.mlp.Hidden" in _kinds(layer):  # a linear layer, and its activation
                steps += [(f"{path}.linear", layer.linear), (path, nn.GELU())]  # type: ignore[list-item]
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
        "and gathers these, which is right and slow:\n"
        f"mk.tensor.TensorPlan((\n{lines}){more})\n"
        "Where one layer's outputs go, feature by feature, to another one, make the two a region, "
        "mk.tensor.Region(entry, column=(first,), row=second), and nothing is gathered in between; "
        "an attention is divided by "
        "heads=."
    )
