"""Architectures against the models of transformers: the same parameters, from their configs and by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mpkit.models import GPT
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.configs import TRAITS, NoArchitecture
from mpkit.prediction.cost_model.known_models import architecture_of


@pytest.mark.parametrize("experts", [0, 4])
def test_the_kits_gpt(experts: int) -> None:
    model = GPT(layers=3, width=48, heads=4, vocab=100, length=16, experts=experts)
    theirs = sum(p.numel() for p in model.parameters())
    assert architecture_of(model).parameters == pytest.approx(theirs, rel=2e-3)  # the head's bias


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("lama3-8b", "llama3-8b"),
        ("nowhere/config.json", "cannot be read"),
        ({"layers": 2, "hidden": 10, "heads": 4}, "heads divides it"),
        ({"layers": 2, "hidden": 12, "heads": 4, "vocab": 9}, "Did you mean 'vocabulary'"),
        ({"layers": 0, "hidden": 12, "heads": 4}, "layers=0"),
        (torch.nn.Linear(2, 2), "mk.profile"),
        (3, "no config"),
    ],
)
def test_what_is_no_architecture(model: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        architecture_of(model)


def test_flops_are_megatrons() -> None:
    """F = 96 B s l h^2 (1 + s/6h + V/16lh) counts four forwards, and attention as if it were not causal."""
    gpt = Architecture(24, 2304, 24, vocabulary=51200)
    s, h = 2048, 2304
    megatron = 96 * s * 24 * h**2 * (1 + s / (6 * h) + 51200 / (16 * 24 * h))
    without_head = 4 * (gpt.forward_flops(s, causal=False) - 2 * s * h * 51200)
    assert without_head + 3 * 2 * s * h * 51200 == pytest.approx(megatron, rel=1e-9)


WANTED = {
    "nemotron": {"num_key_value_heads": 8},
    "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "electra": {"embedding_size": 256},
}
"""What a config does not have by default and its published ones have; electra's large ones have one width."""
AUTO = (
    transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM, transformers.AutoModelForSeq2SeqLM,
    transformers.AutoModelForImageClassification,
)  # fmt: skip


def built(config: Any) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = next(a for a in AUTO if type(config) in a._model_mapping).from_config(config)
    return model


@pytest.mark.parametrize("kind", sorted(TRAITS))
def test_each_kind_has_the_parameters_of_its_module(kind: str) -> None:
    """Whether all values of the config are written, or only those that are not the default, as in files on the Hub."""
    config = CONFIG_MAPPING[kind](**WANTED.get(kind, {}))
    model = built(config)
    theirs = sum(p.numel() for p in model.parameters())
    short = {**json.loads(config.to_json_string(use_diff=True)), "model_type": kind}
    if "tied" in TRAITS[kind]:
        short.pop("tie_word_embeddings", None)
    for given in (config, short, model):
        assert architecture_of(given).parameters == pytest.approx(theirs, rel=0.01)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.AlbertConfig(), "has not counted the parameters of model_type='albert'"),
        (transformers.Mamba2Config(), "has not counted the parameters of model_type='mamba2'"),
        (transformers.Qwen3MoeConfig(mlp_only_layers=[0]), r"mlp_only_layers=\[0\]"),
        (transformers.ElectraConfig(), "embedding_size=128"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_config_that_says_too_little_is_not_guessed_at(config: Any, words: str) -> None:
    with pytest.raises(NoArchitecture, match=words):
        architecture_of(config)
