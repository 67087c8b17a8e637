"""ZeRO-3 gathers a model block by block, whoever calls the blocks, and whoever else uses their parameters."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
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
from benchmarks.memory import ResNet
from mpkit.models import GPT, next_token_loss
from mpkit.strategies.models.chain import repeated_blocks
from mpkit.strategies.replicas.flat import assign_owners
from mpkit.trace import CATEGORIES, Kind, RankTrace
from tests.mesh.test_mesh_training import tokens
from tests.recipes import adamw, logits_loss, sgd
from tests.serial import Clusters, Train, check_equal

pytestmark = pytest.mark.slow

HOW: dict[str, Any] = {"loss": logits_loss, "optimizer": adamw, "steps": 3}
SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
}  # fmt: skip


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


def names(make: Callable[[], nn.Module]) -> list[str]:
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        return list(repeated_blocks(make()))


@pytest.mark.filterwarnings("ignore:.*_token_id.*")
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


def most_buffers(rank: RankTrace, last_step: int) -> tuple[int, int]:
    """The most bytes of buffers in the forward of a step, and in all of it."""
    ops, memory = rank.ops, rank.memory
    mine = memory[memory["category"] == CATEGORIES.index("buffers")]
    held = np.cumsum(mine["delta"])
    of_step = np.flatnonzero(ops["step"] == last_step)
    back = np.flatnonzero((ops["step"] == last_step) & (ops["kind"] == Kind.BACKWARD))[0]
    in_step = (mine["op"] > of_step[0]) & (mine["op"] <= of_step[-1])
    return int(held[in_step & (mine["op"] <= back)].max()), int(held[in_step].max())


@pytest.mark.filterwarnings("ignore:.*_token_id.*")
def test_a_llama_holds_two_blocks_and_sends_three_psi(train: Train, clusters: Clusters) -> None:
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


# ---- ZeRO-1 with optimizers that need whole parameters: each parameter's states are on one rank.


class Orthogonal(torch.optim.Optimizer):
    """Muon in the precision of its parameters: momentum, made orthogonal; vectors by their sign."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                if p.dim() != 2:
                    p.sub_(momentum.tanh(), alpha=group["lr"])
                    continue
                x = momentum / (momentum.norm() + 1e-7)
                for _ in range(5):  # Newton and Schulz
                    x = 1.5 * x - 0.5 * x @ x.mT @ x
                p.sub_(x, alpha=group["lr"])


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocab=17, layers=2, width=8, heads=2, length=6).double()


def pairs_of_tokens() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randint(17, (8, 6)), torch.randint(17, (8, 6))) for _ in range(3)]


PLANS = [
    mk.Plan(dp=4, zero=1, dp_shard=2),
    mk.Plan(pp=2, dp=2, zero=1, schedule="1f1b", microbatches=2),
    mk.Plan(dp=2, zero=1, cp=2, offload="optimizer"),
]


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_muon_by_owner_is_serial_training(train: Train, plan: mk.Plan) -> None:
    how = {"loss": next_token_loss, "optimizer": Orthogonal, "steps": 3, "max_grad_norm": 0.5}
    run = check_equal(train, gpt(), pairs_of_tokens(), plan, **how)
    assert not any("psi (n-1)/n" in row.symbols for row in run.timeline().comm_volume().rows)


def test_owners_hold_the_states_and_send_to_all(train: Train) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2, bias=False)).double()
    data = [(torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64))]
    run = train(model, data, mk.Plan.zero(1, 2), loss=F.mse_loss, optimizer=Orthogonal, steps=2)
    # ---- 32, 8 and 16 elements: rank 0 owns the first weight, rank 1 the others
    assert [rank["optimizer"] for rank in run.timeline().peak_memory] == [32 * 8, 24 * 8]
    sent = [
        int(op["bytes"]) for op in run.trace.ranks[0].ops
        if op["kind"] in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER) and op["step"] == 1
    ]  # fmt: skip
    assert sent == [2 * 32 * 8] * 2  # n k: shards are as large as that of the rank with most


def test_a_checkpoint_goes_from_owners_to_others_and_back(train: Train, tmp_path: Path) -> None:
    how: dict[str, Any] = {"loss": next_token_loss, "optimizer": Orthogonal}
    expected = train(gpt(), pairs_of_tokens(), mk.Plan.ddp(2), steps=6, **how).state_dict()
    saving = {"checkpoint_every": 2, "checkpoint_dir": tmp_path}
    train(gpt(), pairs_of_tokens(), mk.Plan.zero(1, 4), steps=2, **saving, **how)
    train(gpt(), pairs_of_tokens(), mk.Plan.ddp(2), steps=4, resume_from=tmp_path, **saving, **how)
    run = train(gpt(), pairs_of_tokens(), mk.Plan.zero(1, 2), steps=6, resume_from=tmp_path, **how)
    for name, value in run.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-8, atol=1e-10)


def test_the_largest_first_to_the_rank_with_least() -> None:
    assert assign_owners([3, 5, 5, 1, 2], 3) == [2, 0, 1, 0, 2]


# ---- Hybrid sharding: ZeRO within groups of replicas. tests/mesh/test_pairs.py has it with everything else.


def chain(width: int = 8, layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).double()


def batch(width: int = 8, samples: int = 8) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(samples, width).double(), torch.randn(samples, width).double())]


def test_changes_of_a_plan_keep_its_groups(clusters: Clusters) -> None:
    """What would fit and what-if change degrees that groups depend on."""
    big = mk.fits(
        "llama3-70b", mk.Plan(dp=32, zero=3, dp_shard=8, precision="bf16"), "4x8-a100-hdr", sequence=1024
    )
    assert "dp_shard=None" in str(big)
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": adamw}
    run = clusters(4).train(chain(), batch(), mk.Plan(dp=4, zero=3, dp_shard=2), steps=3, **how).wait()
    assert run.what_if(ranks=8).plan == mk.Plan(dp=8, zero=3, dp_shard=2)
    assert run.what_if(zero=0).plan == mk.Plan(dp=4)
    assert run.what_if(dp_shard=None).plan == mk.Plan(dp=4, zero=3)
    assert run.timeline().diagnose() is not None


# ---- Layers that some ranks call and others do not: ZeRO-2 trains them, and ZeRO-3 takes no layer for another one.


class Routed(nn.Module):
    """Calls those of four equal layers that its samples name; the first two samples name others than the last two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        for number, expert in enumerate(self.experts):
            rows = (x[:, 0] == number).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, expert(y[rows]))
        made: Tensor = self.last(y)
        return made


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    x = torch.randn(4, 4).double()
    x[:, 0] = torch.tensor([0.0, 1.0, 2.0, 3.0])
    return [(x, torch.randint(4, (4,)))]


ROUTED_HOW: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": adamw, "steps": 2}


def test_whole_parameters_train(train: Train) -> None:
    check_equal(train, Routed().double(), batches(), mk.Plan(dp=2, zero=2, unused="allow"), **ROUTED_HOW)


def test_no_layer_is_taken_for_another_of_its_size(train: Train) -> None:
    """Without the run's proof, too, which compares some steps only."""
    plan = mk.Plan(dp=2, zero=3, unused="allow")
    with pytest.raises(
        mk.errors.CommMismatch, match=r"of experts\.\d.* of experts\.\d.*zero=2 keeps parameters whole"
    ):
        train(Routed().double(), batches(), plan, **ROUTED_HOW, verify=False)


class Returns(nn.Module):
    """Returns a parameter, for a penalty in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer.weight.T


def test_a_returned_parameter_is_rejected_where_it_is_dropped(train: Train) -> None:
    def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs[0], targets) + outputs[1].square().sum()

    how = {"loss": loss, "optimizer": sgd, "steps": 2}
    with pytest.raises(mk.errors.MpkitError, match="under zero=3 is whole only while the layer computes"):
        train(Returns().double(), batches(), mk.Plan.zero(3, 2), **how)
    check_equal(train, Returns().double(), batches(), mk.Plan.zero(2, 2), **how)
