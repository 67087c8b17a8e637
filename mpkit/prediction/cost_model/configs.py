"""Architectures from the configurations of transformers: where each kind keeps its numbers, and what it has besides.

A configuration says numbers; what a layer is made of follows from its `model_type`. `TRAITS` lists the kinds whose
parameters were counted (tests compare each with the module of transformers). A configuration of another kind describes
a model only where the module is there to be counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from mpkit.prediction.cost_model.architecture import Architecture

__all__ = ["TRAITS", "NoArchitecture", "read_config"]

TRAITS: Mapping[str, frozenset[str]] = {
    kind: frozenset(traits.split())
    for kinds, traits in (
        ("llama mistral phi3 olmo olmo2 olmo3 granite stablelm glm glm4 seed_oss helium", "gated"),
        ("mixtral granitemoe olmoe phimoe qwen2_moe deepseek_v2 deepseek_v3 glm4_moe", "gated"),
        ("gpt_oss", "gated whole_experts"),
        ("qwen2 exaone4 bitnet", "gated"),
        ("qwen3 qwen3_moe", "gated qk_norm"),
        ("gemma gemma2 gemma3_text cohere cohere2 smollm3 ernie4_5", "gated tied"),
        ("arcee apertus nemotron persimmon", ""),
        ("gpt_neox gptj codegen phi", "bias"),
        ("bloom starcoder2", "bias tied"),
        ("falcon", "tied"),
        ("gpt2 gpt_neo gpt_bigcode opt biogpt", "bias tied positions"),
        ("bert roberta distilbert electra", "bias tied positions acausal"),
        ("t5", "tied"),
        ("vit", "bias positions acausal"),
    )
    for kind in kinds.split()
}
"""By model_type, what its numbers do not say.

gated: the MLP has a third matrix. tied: the head is the embedding, unless `tie_word_embeddings` says otherwise.
bias: products add one. positions: they are learned. acausal: a token sees all others. qk_norm: queries and keys are
normalized. whole_experts: transformers divides no experts along tp.
"""
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")


class NoArchitecture(ValueError):
    """A model has no config from which its sizes follow."""


def read_config(config: Mapping[str, Any], *, counted: bool = False) -> Architecture:
    """Return the architecture of a configuration of transformers.

    Args:
        config: names and values, as in a config.json.
        counted: whether the module's parameters will be counted, so that a kind that `TRAITS` lacks may be tried.

    Raises:
        NoArchitecture: the kind has not been counted, or a value makes layers that an `Architecture` cannot describe.
        ValueError: the numbers do not describe a transformer.

    >>> read_config({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
    ...              "n_positions": 1024}).parameters
    124439808
    """
    kind = str(config.get("model_type", ""))

    number = partial(_number, config)
    hidden, layers, heads = number(*WIDTHS), number(*LAYERS), number(*HEADS)
    ffn = number(
        "intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size", "hidden_dim", default=4 * hidden
    )
    numbers = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "ffn": ffn,
        "vocabulary": number("vocab_size"),
    }
    _check(config, kind, numbers, counted)
    traits = TRAITS.get(kind, frozenset())
    activation = str(config.get("hidden_act", config.get("feed_forward_proj", "")))
    encoder, patch = 0, 0
    if kind == "t5":
        encoder, layers = layers, layers + number("num_decoder_layers", default=layers)
    if kind == "vit":
        patch = number("num_channels", default=3) * number("patch_size", default=16) ** 2
    latent = number("kv_lora_rank")
    return Architecture(
        layers, hidden, heads,
        kv_heads=_key_heads(config, heads),
        ffn=ffn,
        vocabulary=len(config.get("id2label") or {}) if kind == "vit" else number("vocab_size"),
        gated="gated" in traits or "gated" in activation or (kind not in TRAITS and "silu" in activation),
        causal="acausal" not in traits,
        tied=bool(config.get("tie_word_embeddings", "tied" in traits)),
        bias="bias" in traits,
        positions=_positions(config, patch) if "positions" in traits else 0,
        head_dim=number("qk_nope_head_dim") if latent else number("head_dim", "d_kv"),
        patch=patch,
        encoder=encoder,
        **_experts(config),
        q_rank=number("q_lora_rank") if latent else 0,
        kv_rank=latent,
        rope_dim=number("qk_rope_head_dim") if latent else 0,
        v_dim=number("v_head_dim") if latent else 0,
        qk_norm="qk_norm" in traits,
        whole_experts="whole_experts" in traits,
        name=kind,
    )  # fmt: skip


def _number(config: Mapping[str, Any], *names: str, default: int = 0) -> int:
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), default)


def _check(config: Mapping[str, Any], kind: str, numbers: Mapping[str, int], counted: bool) -> None:
    """Raise if the configuration describes no transformer, or one that an `Architecture` cannot describe."""
    names = {"hidden": WIDTHS, "layers": LAYERS, "heads": HEADS}
    missing = [spelt[0] for name, spelt in names.items() if not numbers[name]]
    if missing:
        raise ValueError(
            f"a config of model_type={kind!r:.60} without {', '.join(missing)}: give numbers instead, "
            "{'layers': 32, 'hidden': 4096, 'heads': 32, 'vocabulary': 32000}"
        )
    if kind not in TRAITS and not counted:
        raise NoArchitecture(
            f"mpkit has not counted the parameters of model_type={kind!r:.60}, so what its layers are made of is not "
            "known. Give the model itself (built under torch.device('meta') it takes no memory); or, if its layers are "
            f"an attention and an MLP, numbers: {numbers!r}, with 'kv_heads', 'gated', 'experts' and 'top_k' as it has"
        )
    if odd := next(_unlike_layers(config), ""):
        raise NoArchitecture(
            f"a config of model_type={kind!r:.60} with {odd:.80}: its layers are not all alike, which an Architecture "
            f"cannot say. The nearest are these numbers: {numbers!r}"
        )


def _key_heads(config: Mapping[str, Any], heads: int) -> int:
    """Return the heads of keys and values: one in multi-query attention (Shazeer 2019), which has its own words."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    given = config.get("num_key_value_heads", config.get("num_kv_heads"))
    return given if isinstance(given, int) else heads


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an `Architecture` says of experts, those that all tokens visit included; nothing without any."""
    experts = _number(config, "num_local_experts", "num_experts", "n_routed_experts")
    if not experts:
        return {}
    wide = _number(config, "moe_intermediate_size")
    shared = _number(config, "shared_expert_intermediate_size") or _number(config, "n_shared_experts") * wide
    return {
        "experts": experts,
        "top_k": _number(config, "num_experts_per_tok"),
        "expert_ffn": wide,
        "shared_ffn": shared,
        "dense": _number(config, "first_k_dense_replace"),
    }


def _positions(config: Mapping[str, Any], patch: int) -> int:
    if patch:
        side = _number(config, "image_size", default=224) // max(1, _number(config, "patch_size", default=16))
        return side * side + 1
    return _number(config, "max_position_embeddings", "n_positions")


def _unlike_layers(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what makes layers that differ from each other, or embeddings that differ from layers in width."""
    for name, usual in (
        ("decoder_sparse_step", 1), ("moe_layer_freq", 1), ("interleave_moe_layer_step", 1), ("num_hidden_groups", 0)
    ):  # fmt: skip
        if config.get(name) not in (None, usual, [usual] * len(config.get("moe_layer_freq") or ())):
            yield f"{name}={config[name]!r}"
    if config.get("mlp_only_layers"):
        yield f"mlp_only_layers={config['mlp_only_layers']!r}"
    width = next((config[name] for name in WIDTHS if isinstance(config.get(name), int)), None)
    for name in ("embedding_size", "word_embed_proj_dim"):
        if isinstance(config.get(name), int) and config[name] != width:
            yield f"{name}={config[name]}"
    attention = {str(kind) for kind in config.get("layer_types") or ()} - {
        "full_attention",
        "sliding_attention",
    }
    if attention:
        yield f"layer_types={sorted(attention)!r}"
