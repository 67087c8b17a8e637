"""Small random models of transformers' architectures: nothing is downloaded, and each has a few thousand weights.

A decoder's settings are Llama's names; `ARCHITECTURES` says what differs. Dropout is 0 in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk

VOCABULARY, WIDTH, HEADS, LENGTH, CLASSES, BATCH = 40, 32, 4, 8, 5, 4

Batch = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class Architecture:
    """How to build a model, and what it is trained on.

    Attributes:
        name: in the table.
        model: its class in transformers; the config's class is `config`.
        task: what the inputs and the loss are.
        settings: of the config.
        decoder: whether it counts as a decoder of transformers for tensor parallelism.
        division: whether tensor parallelism is tried.
    """

    name: str
    model: str
    config: str
    task: str
    settings: dict[str, Any] = field(default_factory=dict)
    decoder: bool = False
    division: bool = True


TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LLAMA = TOKENS | {
    "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 4, "num_attention_heads": HEADS,
    "num_key_value_heads": 2, "max_position_embeddings": 2 * LENGTH,
}  # fmt: skip
BERT = TOKENS | {
    "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 4, "num_attention_heads": HEADS,
    "max_position_embeddings": 2 * LENGTH + 2,
}  # fmt: skip
SEQ2SEQ = TOKENS | {
    "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": 2 * WIDTH, "decoder_ffn_dim": 2 * WIDTH,
    "max_position_embeddings": 2 * LENGTH, "decoder_start_token_id": 0,
}  # fmt: skip
PICTURES = {
    "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 4, "num_attention_heads": HEADS,
    "image_size": 16, "patch_size": 4, "num_labels": CLASSES,
}  # fmt: skip
CLIP = {
    "text_config": BERT | {"projection_dim": 16},
    "vision_config": {k: v for k, v in PICTURES.items() if k != "num_labels"} | {"projection_dim": 16},
    "projection_dim": 16,
}
SEGFORMER = {
    "num_encoder_blocks": 2, "depths": [2, 2], "sr_ratios": [2, 1], "hidden_sizes": [16, 32], "patch_sizes": [3, 3],
    "strides": [2, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "decoder_hidden_size": 16,
    "num_labels": CLASSES,
}  # fmt: skip
HEAD_DIM = {"head_dim": WIDTH // HEADS}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}


def _decoder(name: str, kind: str, settings: dict[str, Any] | None = None, **more: Any) -> Architecture:
    """A decoder with Llama's settings, or with these alone."""
    return Architecture(
        name,
        f"{kind}ForCausalLM",
        f"{kind}Config",
        "words",
        (LLAMA if settings is None else settings) | more,
        True,
    )


def _encoder(name: str, kind: str, **more: Any) -> Architecture:
    return Architecture(name, f"{kind}ForMaskedLM", f"{kind}Config", "words", BERT | more)


def _seq2seq(name: str, kind: str, settings: dict[str, Any], **more: Any) -> Architecture:
    return Architecture(name, f"{kind}ForConditionalGeneration", f"{kind}Config", "pairs", settings | more)


def _pictures(name: str, kind: str, *, division: bool = True, **settings: Any) -> Architecture:
    return Architecture(
        name, f"{kind}ForImageClassification", f"{kind}Config", "pictures", settings, division=division
    )


GPT2 = TOKENS | {"n_embd": WIDTH, "n_layer": 4, "n_head": HEADS, "n_positions": 2 * LENGTH}

# fmt: off
ARCHITECTURES: tuple[Architecture, ...] = (
    # ---- decoders
    Architecture("gpt2", "GPT2LMHeadModel", "GPT2Config", "words", GPT2, True),
    _decoder("gpt_neox", "GPTNeoX"),
    _decoder("opt", "OPT", ffn_dim=2 * WIDTH, word_embed_proj_dim=WIDTH),
    _decoder("bloom", "Bloom", TOKENS, hidden_size=WIDTH, n_layer=4, n_head=HEADS),
    _decoder("llama", "Llama"),
    _decoder("mistral", "Mistral", **HEAD_DIM),
    _decoder("qwen2", "Qwen2"),
    _decoder("qwen3", "Qwen3", **HEAD_DIM),
    _decoder("gemma", "Gemma", **HEAD_DIM),
    _decoder("gemma2", "Gemma2", **HEAD_DIM),
    Architecture("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", "words", LLAMA | HEAD_DIM, True),
    _decoder("phi", "Phi"),
    _decoder("phi3", "Phi3"),
    _decoder("falcon", "Falcon", new_decoder_architecture=True, num_kv_heads=2),
    _decoder("mpt", "Mpt", TOKENS, d_model=WIDTH, n_heads=HEADS, n_layers=4, max_seq_len=2 * LENGTH),
    _decoder("gptj", "GPTJ", GPT2, rotary_dim=4),
    _decoder("gpt_neo", "GPTNeo", LLAMA, num_layers=4, num_heads=HEADS, attention_types=[[["global", "local"], 2]]),
    _decoder("olmo", "Olmo"),
    _decoder("olmo2", "Olmo2"),
    _decoder("granite", "Granite"),
    _decoder("stablelm", "StableLm"),
    _decoder("cohere", "Cohere"),
    _decoder("smollm3", "SmolLM3"),
    _decoder("starcoder2", "Starcoder2"),
    _decoder("helium", "Helium", **HEAD_DIM),
    _decoder("glm", "Glm", **HEAD_DIM),
    _decoder("nemotron", "Nemotron"),
    _decoder("exaone4", "Exaone4", **HEAD_DIM),
    # ---- what else a forward may give back
    replace(_decoder("llama+states", "Llama", output_hidden_states=True), task="states"),
    _decoder("qwen2+attentions", "Qwen2", output_attentions=True, attn_implementation="eager"),
    # ---- mixtures of experts
    _decoder("mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2),
    _decoder("qwen3_moe", "Qwen3Moe", num_experts=4, **HEAD_DIM, **MOE),
    _decoder("qwen2_moe", "Qwen2Moe", num_experts=4, shared_expert_intermediate_size=WIDTH, **MOE),
    _decoder("granite_moe", "GraniteMoe", num_local_experts=4, num_experts_per_tok=2),
    _decoder("olmoe", "Olmoe", num_experts=4, num_experts_per_tok=2),
    _decoder("gpt_oss", "GptOss", num_local_experts=4, num_experts_per_tok=2, **HEAD_DIM),
    _decoder(
        "deepseek_v3", "DeepseekV3", n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1,
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, head_dim=4, **MOE
        | {"num_key_value_heads": HEADS},
    ),
    # ---- no attention
    _decoder("mamba", "Mamba", TOKENS, hidden_size=WIDTH, num_hidden_layers=4, state_size=4),
    _decoder(
        "mamba2", "Mamba2", TOKENS, hidden_size=WIDTH, num_hidden_layers=4, state_size=4, num_heads=8,
        head_dim=8, n_groups=1, chunk_size=4,
    ),
    _decoder(
        "rwkv", "Rwkv", TOKENS, hidden_size=WIDTH, attention_hidden_size=WIDTH, num_hidden_layers=4,
        context_length=2 * LENGTH,
    ),
    # ---- encoders
    _encoder("bert", "Bert"),
    _encoder("roberta", "Roberta"),
    _encoder("deberta_v2", "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    _encoder("distilbert", "DistilBert", dim=WIDTH, hidden_dim=2 * WIDTH, n_layers=4, n_heads=HEADS),
    _encoder("electra", "Electra", embedding_size=WIDTH),
    _encoder("albert", "Albert", embedding_size=16),
    _encoder("modernbert", "ModernBert", global_attn_every_n_layers=2, local_attention=4),
    # ---- encoders and decoders
    _seq2seq(
        "t5", "T5", TOKENS, d_model=WIDTH, d_kv=8, d_ff=2 * WIDTH, num_layers=2, num_heads=HEADS,
        decoder_start_token_id=0,
    ),
    _seq2seq("bart", "Bart", SEQ2SEQ),
    _seq2seq("pegasus", "Pegasus", SEQ2SEQ),
    Architecture(
        "whisper", "WhisperForConditionalGeneration", "WhisperConfig", "speech", SEQ2SEQ | {"num_mel_bins": 8,
        "max_source_positions": LENGTH, "max_target_positions": 2 * LENGTH, "suppress_tokens": None,
        "begin_suppress_tokens": None},
    ),
    # ---- pictures and sound
    _pictures("vit", "ViT", **PICTURES),
    _pictures("deit", "DeiT", **PICTURES),
    _pictures(
        "swin", "Swin", image_size=16, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
        window_size=4, num_labels=CLASSES,
    ),
    _pictures("dinov2", "Dinov2", **PICTURES),
    _pictures(
        "convnext", "ConvNext", division=False, hidden_sizes=[8, 16], depths=[2, 2], num_stages=2,
        num_labels=CLASSES, image_size=16,
    ),
    _pictures(
        "resnet", "ResNet", division=False, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
        num_labels=CLASSES,
    ),
    _pictures("segformer", "Segformer", **SEGFORMER),
    Architecture("segformer+masks", "SegformerForSemanticSegmentation", "SegformerConfig", "masks", SEGFORMER),
    Architecture(
        "wav2vec2", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", "sound", BERT | {"conv_dim": (16,
        16), "conv_kernel": (4, 4), "conv_stride": (2, 2), "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_labels": CLASSES,
        "apply_spec_augment": False, "mask_time_prob": 0.0, "classifier_proj_size": 16},
    ),
    Architecture("clip", "CLIPModel", "CLIPConfig", "captions", CLIP),
    Architecture("clip+whole", "CLIPModel", "CLIPConfig", "captions+whole", CLIP),
)
# fmt: on


def build(architecture: Architecture) -> nn.Module:
    """The model: random, in float64, in training mode.

    Every weight is moved by some noise, so that biases and normalizations are not at the 0 and 1 where mistakes cancel.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    config = getattr(transformers, architecture.config)(**architecture.settings)
    inner = (getattr(config, name, None) for name in ("text_config", "vision_config"))
    for one in [config, *(found for found in inner if found is not None)]:
        for name, value in one.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(one, name, 0.0)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, architecture.model)(config).double().train()
    if "expert" in " ".join(name for name, _ in model.named_modules()):
        model.set_experts_implementation("eager")  # type: ignore[operator]  # grouped_mm knows no float64
    if architecture.task == "captions+whole":
        model.logit_scale.requires_grad_(False)  # not a sample's, and so not an output
        model = Embeddings(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


class Embeddings(nn.Module):
    """Of CLIP what each sample has by itself, and not the logits of all samples against all."""

    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        output = self.clip(input_ids=input_ids, pixel_values=pixel_values)
        return output.image_embeds, output.text_embeds


# ---- tasks --------------------------------------------------------------------------------------------------


def batch_of(task: str, size: int = BATCH) -> Batch:
    """Inputs by name, and targets."""
    words = torch.randint(1, VOCABULARY, (size, LENGTH))
    pictures = torch.randn(size, 3, 16, 16, dtype=torch.float64)
    classes = torch.randint(CLASSES, (size,))
    next_words = {"input_ids": words}, torch.randint(1, VOCABULARY, (size, LENGTH))
    return {
        "words": next_words,
        "states": next_words,
        "pairs": ({"input_ids": words, "decoder_input_ids": words.flip(1)}, words),
        "speech": (
            {
                "input_features": torch.randn(size, 8, 2 * LENGTH, dtype=torch.float64),
                "decoder_input_ids": words,
            },
            words,
        ),
        "pictures": ({"pixel_values": pictures}, classes),
        "masks": ({"pixel_values": pictures}, torch.randint(CLASSES, (size, 8, 8))),
        "sound": ({"input_values": torch.randn(size, 64, dtype=torch.float64)}, classes),
        task if "captions" in task else "captions": (
            {"input_ids": words, "pixel_values": pictures},
            torch.arange(size),
        ),
    }[task]


def loss_of(task: str) -> Callable[[Any, Any], Any]:
    """The loss, a mean over samples but for captions, each of which is compared with all."""
    return {
        "pictures": _of_classes,
        "masks": _of_classes,
        "sound": _of_classes,
        "states": _of_states,
        "captions": _of_captions,
        "captions+whole": mk.whole_batch_loss(_of_embeddings),
    }.get(task, _of_words)


def _of_words(output: Any, targets: Tensor) -> Tensor:
    logits = output[0] if isinstance(output, tuple) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _of_embeddings(output: Any, targets: Tensor) -> Tensor:
    """The same, of what each sample has by itself."""
    pictures, captions = output
    logits = 10 * pictures @ captions.t()
    own = torch.arange(len(logits))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2


def _of_states(output: Any, targets: Tensor) -> Tensor:
    """With the hidden states, as in distillation."""
    return _of_words(output, targets) + torch.stack([h.square().mean() for h in output.hidden_states]).sum()


def _of_classes(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, targets)


def _of_captions(output: Any, targets: Tensor) -> Tensor:
    """CLIP's: each caption against all pictures of the batch."""
    logits = output.logits_per_image
    own = torch.arange(len(logits))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2
