"""Meshes: pipelines, replicas, shared layers and shared sequences together train what plain PyTorch trains."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.prepare.prepare import prepare, warn_if_unwise
from mpkit.strategies.runtime.train import Training
from tests.recipes import adamw
from tests.serial import Train, check_equal

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")]

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


def test_a_plan_that_works_against_itself_says_so(clusters: Any) -> None:
    plan = mk.Plan(pp=2, dp=2, zero=3, schedule="1f1b", microbatches=2)
    with pytest.warns(mk.errors.UnwisePlan, match=r"3 m psi per step with m = 2.*zero=1") as said:
        clusters(4).train(small_gpt(), tokens(4, 12, 33), plan, **HOW | {"steps": 1}).wait()
    assert {each.filename for each in said} == {__file__}, "shown at the user's line"
    offloaded = replace(plan, offload="params")
    with pytest.warns(mk.errors.UnwisePlan, match="zero=1, offload='optimizer'"):  # a plan that works
        warn_if_unwise(offloaded)
    made = {"batch": tokens(4, 12, 33)[0], "loss": HOW["loss"], "optimizer": HOW["optimizer"]}
    with pytest.warns(mk.errors.UnwisePlan, match="3 m psi") as said:
        mk.trace_fake(small_gpt, plan, cluster=clusters(4), **made)
    assert [each.filename for each in said] == [__file__]


# ---- 200 meshes at random, of up to 8 ranks with everything that a Plan divides, equal serial training.

RANKS, HEADS, EXPERTS = 8, 4, 4
STAGES = {
    "looped_bfs": 2, "interleaved_1f1b": 2, "overlapped_1f1b": 2, "interleaved_zb": 2, "zbv": 2, "dualpipev": 2
}  # fmt: skip
WHOLE_GROUPS = ("interleaved_zb", "dualpipev")
DRAWN_HOW: dict[str, Any] = {"loss": next_token_loss, "optimizer": adamw, "steps": 3, "max_grad_norm": 0.5}


def degree(draw: Random, used: int, *degrees: int) -> int:
    """One of the degrees that there are ranks for."""
    return draw.choice([n for n in degrees if used * n <= RANKS])


def some_plan(draw: Random, *, experts: bool) -> mk.Plan:
    """At least two ranks, and one way or another of everything."""
    pp = degree(draw, 1, 1, 2, 2, 3)
    dp = degree(draw, pp, 1, 2, 3, 4)
    tp = degree(draw, pp * dp, 1, 2, 2, 3)
    cp = degree(draw, pp * dp * tp, *([1, 2, 4] if pp * dp * tp > 1 else [2, 4]))
    schedule = draw.choice(["1f1b", "zb_h1", "zb_h2", *STAGES] if pp > 1 else ["gpipe", "overlapped_1f1b"])
    zero, sequence = draw.randrange(4), tp > 1 and draw.random() < 0.7
    methods = {1: ["ring"], 2: ["ring", "ulysses"], 4: ["ring", "ulysses", (2, 2)]}[cp]
    shard = 2 if dp == 4 and zero and draw.random() < 0.7 else None
    etp = draw.choice([1, 1, tp, None] if sequence else [tp, None]) if experts and tp > 1 else None
    tokens_apart = (shard or dp) * cp * (tp if etp == 1 else 1)
    degrees = [n for n in (1, 2, 4) if tokens_apart % n == 0 and (n > 1 or tokens_apart % 2)]
    ep = draw.choice(degrees) if experts else 1
    microbatches = 2 * pp if schedule in WHOLE_GROUPS else draw.randint(1, 3)
    order, method = draw.choice(["contiguous", "zigzag"]), draw.choice(methods if tp < 3 else ["ring"])
    return mk.Plan(
        pp=pp, dp=dp, tp=tp, cp=cp, schedule=schedule, virtual_stages=STAGES.get(schedule, 1) if pp > 1 else 1,
        microbatches=microbatches, cp_order="contiguous" if method == "ulysses" else order, cp_method=method,
        sequence_parallel=sequence, zero=zero, dp_shard=shard, ep=ep, etp=etp,
        recompute=draw.choice(["none", "selective", "full"]), prefetch=draw.randrange(3),
        bucket_mb=draw.choice([0.001, 25]), offload=draw.choice(["none", "none", "optimizer"]) if zero else "none",
    )  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200))
def test_a_random_mesh_equals_serial_training(train: Train, seed: int) -> None:
    draw = Random(seed)
    experts = draw.random() < 0.5
    plan = some_plan(draw, experts=experts)
    torch.manual_seed(seed)
    heads = HEADS * plan.tp if plan.cp_method != "ring" else max(HEADS, plan.tp)
    length = 2 * plan.cp * 2 * plan.tp
    model = GPT(
        vocab=draw.randint(plan.tp, 20), layers=plan.pp * plan.virtual_stages, width=heads * draw.randint(1, 3),
        heads=heads, length=length, experts=EXPERTS if experts else 0, top_k=draw.randint(1, 2),
    ).double()  # fmt: skip
    batch = max(plan.microbatches, 3) + draw.randrange(3)

    def tokens() -> Tensor:
        return torch.randint(model.config.vocab, (batch, length))

    check_equal(train, model, [(tokens(), tokens()) for _ in range(2)], plan, **DRAWN_HOW)
