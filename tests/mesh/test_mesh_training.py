"""Meshes: pipelines, replicas, shared layers and shared sequences together train what plain PyTorch trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
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
from tests.recipes import adamw, huge_loss, logits_loss, sgd
from tests.serial import EXACT, Train, check_equal

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


FOREIGN: list[dict[str, Any]] = [
    {"tp": 3},
    {"dp": 2, "tp": 2, "zero": 3, "sequence_parallel": True},
    {"pp": 2, "dp": 2, "tp": 2, "schedule": "1f1b", "zero": 1, "sequence_parallel": True},
    {"pp": 2, "dp": 2, "tp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2, "zero": 3},
    {"pp": 2, "cp": 2, "tp": 2, "schedule": "zb_h1", "zero": 1},
]


@pytest.mark.soak
@pytest.mark.parametrize("mesh", FOREIGN, ids=words)
@pytest.mark.parametrize("make", [gpt2, llama, bert])
def test_models_of_transformers_on_meshes(train: Train, make: Any, mesh: dict[str, Any]) -> None:
    """As they are; also where a stage begins between a region's columns and its rows, in shards of unequal size."""
    torch.manual_seed(3)
    model = make().double()
    data = [({"input_ids": x}, y) for x, y in tokens(5, 8, 33)]
    check_equal(train, model, data, mk.Plan(microbatches=2, **mesh), **{**HOW, "loss": logits_loss})


class Within(nn.Module):
    """A model that is no chain, around one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_gpt()

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(ids)
        return logits


def test_a_stage_begins_within_a_region(train: Train) -> None:
    """Hooks of opened modules scatter the sequence (block0) and gather it (its MLP); no weight is in both stages."""
    data = tokens(5, 8, 33)
    plan = mk.Plan(pp=2, tp=2, sequence_parallel=True, microbatches=2, cut=["inner.block0.mlp.up"])
    check_equal(train, Within(), data, plan, **HOW)
    partition = prepare(Within(), data, plan, ranks=4, **HOW).where.partition
    assert partition is not None and partition.shared_weights == []


# ---- at random -----------------------------------------------------------------------------------------------------


STAGES = {
    "looped_bfs": 2, "interleaved_1f1b": 2, "overlapped_1f1b": 2, "interleaved_zb": 2, "zbv": 2, "dualpipev": 2
}  # fmt: skip


def some_mesh(draw: Any) -> dict[str, Any]:
    """Up to 8 ranks."""
    pp = draw(st.sampled_from([1, 2, 2, 3]))
    dp = draw(st.sampled_from([n for n in (1, 2, 3, 4) if pp * n <= 8]))
    tp = draw(st.sampled_from([n for n in (1, 2, 3) if pp * dp * n <= 8]))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zb_h1", "zb_h2", *STAGES])) if pp > 1 else "gpipe"
    whole = schedule in ("interleaved_zb", "dualpipev")
    zero = draw(st.integers(0, 3))
    return {
        "pp": pp, "dp": dp, "tp": tp, "schedule": schedule,
        "virtual_stages": STAGES.get(schedule, 1),
        "microbatches": 2 * pp if whole else draw(st.integers(1, 3)),
        "zero": zero, "dp_shard": draw(st.sampled_from([None, 2])) if dp == 4 and zero else None,
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "prefetch": draw(st.integers(0, 2)), "bucket_mb": draw(st.sampled_from([0.001, 25])),
    }  # fmt: skip


@pytest.mark.soak
@settings(max_examples=12)
@given(data=st.data())
def test_random_meshes_of_chains_equal_serial_training(train: Train, data: Any) -> None:
    """Pairs of linear layers, odd widths, cut wherever; with fewer samples than replicas now and then."""
    plan = some_mesh(data.draw)
    torch.manual_seed(data.draw(st.integers(0, 99)))
    width = data.draw(st.integers(plan["tp"], 7))
    layers: list[nn.Module] = []
    for _ in range(plan["pp"] * plan["virtual_stages"]):
        layers += [nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 5), nn.LayerNorm(5)]
    model = nn.Sequential(*layers, nn.Linear(5, 2)).double()
    batch = plan["microbatches"] + data.draw(st.integers(0, 4))
    batches = [(torch.randn(batch, 5).double(), torch.randn(batch, 2).double()) for _ in range(2)]
    check_equal(train, model, batches, mk.Plan(**plan), **{**HOW, "loss": F.mse_loss})


# ---- what goes around it --------------------------------------------------------------------------------------------


class Embeds(nn.Module):
    """Tokens to vectors; the head's weight is the same one."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Unembeds(Embeds):
    """Vectors to logits."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


@pytest.mark.parametrize(("zero", "trained"), [pytest.param(0, True, marks=pytest.mark.soak), (3, False)])
def test_tied_weights_of_pipelines_with_replicas(train: Train, zero: int, trained: bool) -> None:
    torch.manual_seed(1)
    weight = nn.Parameter(torch.randn(11, 6) * 0.1, requires_grad=trained)
    layers = [Embeds(weight), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), Unembeds(weight)]
    model, data = nn.Sequential(*layers).double(), tokens(6, 5, 11)
    for how in (
        {"pp": 3, "schedule": "1f1b"},
        {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    ):
        run = check_equal(train, model, data, mk.Plan(dp=2, zero=zero, microbatches=2, **how), **HOW)
        assert torch.equal(run.state_dict()["0.weight"], run.state_dict()["5.weight"])


def test_an_overflow_on_one_rank_skips_the_step_on_all(train: Train) -> None:
    """The loss of the last batch cannot be shown in fp16 once it is scaled."""
    torch.manual_seed(6)
    model, data = small_gpt().float(), tokens(6, 12, 33)
    plan = mk.Plan(pp=2, dp=2, tp=2, schedule="1f1b", microbatches=2, zero=1, precision="fp16")
    how = {**HOW, "loss": huge_loss, "steps": 1}
    after = train(model, data, plan, **how).state_dict()
    assert all(torch.equal(after[name], value) for name, value in model.state_dict().items())
    other = train(model, data, plan, **{**how, "loss": next_token_loss}).state_dict()
    assert any(not torch.equal(other[name], value) for name, value in model.state_dict().items())


def test_micro_batches_add_up_to_the_global_batch(train: Train) -> None:
    """Global batch = micro-batch x micro-batches x dp; the samples that ranks took are all, and each once a replica."""
    torch.manual_seed(8)
    data = tokens(8, 12, 33)
    run = train(small_gpt(), data, mk.Plan(pp=2, dp=2, tp=2, schedule="1f1b", microbatches=2), **HOW)
    everything = mk.data.sample_digests(*data[0])
    first = run.samples_seen[0]
    assert sorted(first[0] + first[2]) == sorted(everything), "ranks 0 and 2 are two replicas' first stages"
    assert first[0] == first[1], "ranks that share layers take the same samples"


@pytest.mark.soak
def test_dropout_is_drawn_anew_by_ranks_that_share_layers(train: Train) -> None:
    """It is not serial training's inside of a region; but training runs, and goes on the same from run to run."""
    torch.manual_seed(9)
    model, data = small_gpt(dropout=0.3), tokens(6, 12, 33)
    for mesh in (
        {"tp": 2, "sequence_parallel": True},
        {"pp": 2, "tp": 2, "schedule": "1f1b", "recompute": "full"},
    ):
        plan = mk.Plan(microbatches=2, **mesh)
        one, other = (train(model, data, plan, **HOW) for _ in range(2))
        assert one.losses == other.losses
        torch.testing.assert_close(one.state_dict(), other.state_dict(), **EXACT)


def test_a_recomputed_forward_draws_the_same_on_a_mesh(train: Train) -> None:
    torch.manual_seed(10)
    model, data = small_gpt(dropout=0.3), tokens(6, 12, 33)
    runs = [
        train(model, data, mk.Plan(tp=2, microbatches=2, recompute=again), **HOW).losses
        for again in ("none", "full")
    ]
    torch.testing.assert_close(*runs, **EXACT)


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


@pytest.mark.parametrize(("plan", "says"), [
    (mk.Plan(tp=4), r"3 heads.*tp=3"),
    (mk.Plan(cp=5), r"Sequences of s=12 tokens on cp=5"),
], ids=str)  # fmt: skip
def test_refused_before_any_rank_starts(clusters: Any, plan: mk.Plan, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        clusters(plan.ranks).train(small_gpt(), tokens(4, 12, 33), plan, **HOW)


def test_a_sequence_that_ranks_do_not_divide(clusters: Any) -> None:
    with pytest.raises(ValueError, match=r"over 2 ranks.*\[4, 11, 12\]: pad it to 12"):
        clusters(2).train(small_gpt(), tokens(4, 11, 33), mk.Plan(tp=2, sequence_parallel=True), **HOW)


def test_a_model_nobody_knows_how_to_divide(clusters: Any) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    data = [(torch.randn(4, 3), torch.randn(4, 3))]
    with pytest.raises(ValueError, match="Odd has none"):
        clusters(2).train(Odd(), data, mk.Plan(tp=2), loss=F.mse_loss, optimizer=sgd)


def test_a_plan_that_works_against_itself_says_so(clusters: Any) -> None:
    plan = mk.Plan(pp=2, dp=2, zero=3, schedule="1f1b", microbatches=2)
    with pytest.warns(mk.errors.UnwisePlan, match=r"3 m psi per step with m = 2.*zero=1") as said:
        clusters(4).train(small_gpt(), tokens(4, 12, 33), plan, **HOW | {"steps": 1}).wait()
    assert {each.filename for each in said} == {__file__}, "shown at the user's line"
    made = {"batch": tokens(4, 12, 33)[0], "loss": HOW["loss"], "optimizer": HOW["optimizer"]}
    with pytest.warns(mk.errors.UnwisePlan, match="3 m psi") as said:
        mk.trace_fake(small_gpt, plan, cluster=clusters(4), **made)
    assert [each.filename for each in said] == [__file__]
