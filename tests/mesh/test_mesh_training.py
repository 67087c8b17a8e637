"""Meshes: pipelines, replicas, shared layers and shared sequences together train what plain PyTorch trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.prepare.prepare import prepare
from mpkit.strategies.runtime.train import Training
from tests.recipes import adamw

pytestmark = [
    pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan"),
    pytest.mark.filterwarnings("ignore:.*_token_id.*"),
]


HOW: dict[str, Any] = {"loss": next_token_loss, "optimizer": adamw, "steps": 5, "max_grad_norm": 0.5}


def tokens(batch: int, length: int, vocab: int) -> list[tuple[Tensor, Tensor]]:
    """Two batches of sequences, and what comes next in them."""
    ids = [torch.randint(0, vocab, (batch, length + 1)) for _ in range(2)]
    return [(x[:, :-1], x[:, 1:]) for x in ids]


def small_gpt(dropout: float = 0.0) -> nn.Module:
    """33 tokens, 3 heads: neither 2 nor 4 ranks divide them."""
    torch.manual_seed(0)
    return GPT(vocab=33, layers=3, width=12, heads=3, length=12, dropout=dropout).double()


def words(plan: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in plan.items())


# ---- models of transformers -----------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    """With its head tied to its embedding, and Conv1D."""
    config = GPT2Config(
        vocab_size=33, n_positions=16, n_embd=12, n_layer=3, n_head=3, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama(key_heads: int = 3) -> nn.Module:
    """With 3 key heads for 6 query heads, or fewer, and a gated MLP whose width is odd."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=33, hidden_size=24, intermediate_size=29, num_hidden_layers=3, num_attention_heads=6,
            num_key_value_heads=key_heads, max_position_embeddings=16,
        )
    )  # fmt: skip


def bert() -> nn.Module:
    """With layer norms after, and a head of its own."""
    return BertForMaskedLM(
        BertConfig(
            vocab_size=33, hidden_size=12, intermediate_size=17, num_hidden_layers=3, num_attention_heads=3,
            max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        )
    )  # fmt: skip


# ---- what goes around it --------------------------------------------------------------------------------------------


def held_alike(ctx: Any, job: TrainJob) -> dict[str, Tensor]:
    """After all steps, the parameters that are no shards."""
    training = Training(ctx, job)
    for step in range(job.how.steps):
        training.step(step)
    with training.sync.gathered():
        return {
            name: parameter.detach().clone()
            for stage in training.sync.stages.values()
            for name, parameter in stage.named_parameters()
            if name not in stage.sharded.shards
        }


@pytest.mark.parametrize("mesh", [
    pytest.param({"dp": 2, "cp": 2, "tp": 2}, marks=pytest.mark.soak),
    pytest.param({"dp": 4, "tp": 2, "zero": 3}, marks=pytest.mark.soak),
    {"dp": 2, "tp": 2, "zero": 3},
    pytest.param({"dp": 2, "cp": 2, "tp": 2, "zero": 1, "sequence_parallel": True}, marks=pytest.mark.soak),
], ids=words)  # fmt: skip
def test_what_ranks_hold_alike_stays_alike_to_the_last_bit(clusters: Any, mesh: dict[str, Any]) -> None:
    """With shards of unequal size beside it, whose sums over replicas may be made in any order."""
    torch.manual_seed(12)
    plan = mk.Plan(**mesh)
    job = prepare(small_gpt(), tokens(8, 12, 33), plan, ranks=plan.ranks, **HOW)
    first, *others = clusters(plan.ranks).run(held_alike, job)
    assert first and all(torch.equal(other[name], first[name]) for other in others for name in first)


# ---- what cannot be --------------------------------------------------------------------------------------------------


def test_a_plan_that_works_against_itself_says_so(clusters: Any) -> None:
    plan = mk.Plan(pp=2, dp=2, zero=3, schedule="1f1b", microbatches=2)
    with pytest.warns(mk.errors.UnwisePlan, match=r"3 m psi per step with m = 2.*zero=1") as said:
        clusters(4).train(small_gpt(), tokens(4, 12, 33), plan, **HOW | {"steps": 1}).wait()
    assert {each.filename for each in said} == {__file__}, "shown at the user's line"
    made = {"batch": tokens(4, 12, 33)[0], "loss": HOW["loss"], "optimizer": HOW["optimizer"]}
    with pytest.warns(mk.errors.UnwisePlan, match="3 m psi") as said:
        mk.trace_fake(small_gpt, plan, cluster=clusters(4), **made)
    assert [each.filename for each in said] == [__file__]
