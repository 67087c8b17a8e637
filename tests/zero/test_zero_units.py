"""ZeRO-3 gathers a model block by block, whoever calls the blocks, and whoever else uses their parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    SwinConfig,
    SwinForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

import mpkit as mk
from mpkit.models import GPT, ResNet
from mpkit.strategies.models.chain import repeated_blocks
from mpkit.trace import CATEGORIES, Kind, RankTrace
from tests.mesh.test_mesh_training import tokens
from tests.recipes import adamw, logits_loss
from tests.serial import Train, check_equal

pytestmark = pytest.mark.filterwarnings("ignore:.*_token_id.*")

HOW: dict[str, Any] = {"loss": logits_loss, "optimizer": adamw, "steps": 3}
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
}


def llama(layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_hidden_layers=layers, num_key_value_heads=2, max_position_embeddings=16)
    return LlamaForCausalLM(config).double()


class T5(nn.Module):
    """An encoder and a decoder, whose first blocks hand a bias on to the others."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2}
        self.t5 = T5ForConditionalGeneration(T5Config(**sizes, num_layers=3, dropout_rate=0.0))

    def forward(self, tokens: Tensor) -> Any:
        return self.t5(input_ids=tokens, decoder_input_ids=tokens, use_cache=False)


# ---- which blocks ------------------------------------------------------------------------------------------------


def names(make: Callable[[], nn.Module]) -> list[str]:
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        return list(repeated_blocks(make()))


def test_the_blocks_of_models() -> None:
    assert names(lambda: llama(3)) == ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert names(lambda: GPT(layers=2, width=16, heads=2, length=8)) == ["block0", "block1"]
    assert names(lambda: ResNet(1, 4, width=4))[:2] == ["groups.0.0", "groups.0.1"]
    assert names(T5) == [f"t5.{half}.block.{i}" for half in ("encoder", "decoder") for i in range(3)]
    bart = BartConfig(
        d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, vocab_size=32
    )
    assert len(names(lambda: BartForConditionalGeneration(bart))) == 4
    experts = MixtralConfig(**SIZES, num_hidden_layers=2, num_key_value_heads=2, num_local_experts=4)
    assert names(lambda: MixtralForCausalLM(experts)) == ["model.layers.0", "model.layers.1"]
    one = AlbertConfig(**SIZES, num_hidden_layers=3, embedding_size=8)
    assert names(lambda: AlbertForMaskedLM(one)) == ["albert.encoder.albert_layer_groups.0.albert_layers.0"]
    nested = SwinConfig(
        image_size=16, patch_size=2, embed_dim=4, depths=[2, 1], num_heads=[1, 1], window_size=2
    )
    assert names(lambda: SwinForImageClassification(nested)) == [
        f"swin.encoder.layers.{stage}.blocks.{i}" for stage, depth in enumerate([2, 1]) for i in range(depth)
    ]
    towers = nn.ModuleDict({name: nn.Sequential(llama(2)) for name in ("left", "right")})
    assert len(repeated_blocks(towers)) == 4


# ---- what is whole -----------------------------------------------------------------------------------------------


def most_buffers(rank: RankTrace, last_step: int) -> tuple[int, int]:
    """The most bytes of buffers in the forward of a step, and in all of it."""
    ops, memory = rank.ops, rank.memory
    mine = memory[memory["category"] == CATEGORIES.index("buffers")]
    held = np.cumsum(mine["delta"])
    of_step = np.flatnonzero(ops["step"] == last_step)
    back = np.flatnonzero((ops["step"] == last_step) & (ops["kind"] == Kind.BACKWARD))[0]
    in_step = (mine["op"] > of_step[0]) & (mine["op"] <= of_step[-1])
    return int(held[in_step & (mine["op"] <= back)].max()), int(held[in_step].max())


def test_a_llama_holds_two_blocks_and_sends_three_psi(
    train: Train, clusters: Callable[[int], mk.Cluster]
) -> None:
    """Real and played. In the backward there are as many gradients on their way to their shards.

    Played ranks count temporaries too: those of two tokens, and the gradient that autograd makes at the moment.
    """
    prefetch = 1
    plan, data = mk.Plan.zero(3, 2, prefetch=prefetch), tokens(4, 8, 32)
    model = llama()
    psi = sum(parameter.nbytes for parameter in model.parameters())
    sizes = [parameter.nbytes for parameter in repeated_blocks(model)["model.layers.0"].parameters()]
    block, weight = sum(sizes), max(sizes)
    own = sum(buffer.nbytes for buffer in model.buffers())
    run = check_equal(train, model, data, plan, **HOW)
    assert run.timeline().comm_bytes == [{"all_gather": 2 * psi, "reduce_scatter": psi}] * 2
    played = mk.trace_fake(llama, plan, batch=tokens(2, 2, 32)[0], cluster=clusters(1), **HOW)
    for trace, slack, gradient in ((run.trace, 0, 0), (played, 0.15 * block, weight)):
        ahead, most = most_buffers(trace.ranks[0], HOW["steps"] - 1)
        assert block <= ahead - own <= (1 + prefetch) * block + slack
        assert most - own <= (3 + prefetch) * block + slack + gradient
