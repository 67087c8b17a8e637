"""The division of known models' blocks, by the names of their classes; transformers is not imported.

Only what a class's forward does matters here: which layers stand between an f and a g, which attributes count heads,
and which arguments carry gradients.
"""

from __future__ import annotations

from dataclasses import replace

from mpkit.plan.tensor_plan import Region

__all__ = ["BLOCKS", "EMBEDDINGS", "HEADS", "SEQUENCES"]

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
