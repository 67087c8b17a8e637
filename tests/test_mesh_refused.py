"""What one would mistype around a mesh: refused before any rank starts, with the reason and what works instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import mpkit as mk
from mpkit.models import GPT, MLP, next_token_loss
from mpkit.plan.plan import Plan
from mpkit.plan.tensor_plan import Region, TensorPlan
from mpkit.strategies.prepare.arguments.arguments import check_plan
from mpkit.strategies.prepare.prepare import prepare
from tests.mesh.test_mesh_training import adamw, logits_loss, tokens

pytestmark = pytest.mark.filterwarnings("ignore:.*_token_id.*")


class Classifier(nn.Module):
    """A class for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv, self.out = nn.Embedding(32, 16), nn.Linear(16, 48), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(self.tokens(x)).chunk(3, -1))
        found: Tensor = self.out(F.scaled_dot_product_attention(q, k, v)[:, 0].mean(1))
        return found


def gpt() -> nn.Module:
    return GPT(vocab=32, layers=2, width=16, heads=4, length=16)


def eager() -> nn.Module:
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=12, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.set_attn_implementation("eager")
    return model


def mlp() -> nn.Module:
    return MLP(inputs=6, width=8, layers=4, outputs=3)


def of_one(name: str) -> TensorPlan:
    return TensorPlan((Region("block*.mlp", (name,), "block*.mlp.out"),))


def writes_into_logits(logits: Tensor, targets: Tensor) -> Tensor:
    return next_token_loss(logits.mul_(2), targets)


def adafactor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params)


def rows() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 6), torch.randint(0, 3, (8,)))]


TOKENS = tokens(8, 16, 32)
SHORT = [(x[:, :15], y[:, :15]) for x, y in TOKENS]
CLASSES = [(x, torch.zeros(8, dtype=torch.long)) for x, _ in TOKENS]
NAMED = [({"input_ids": x}, y) for x, y in TOKENS]

WRONG: dict[str, tuple[Callable[[], nn.Module], Any, Plan, dict[str, Any], str]] = {
    "more ranks than heads": (gpt, TOKENS, Plan(tp=8), {}, r"tp=8: block0.attention has 4 heads.*tp=4 is"),
    "an optimizer of whole matrices, layers shared": (
        gpt, TOKENS, Plan(tp=2), {"optimizer": adafactor}, r"Adafactor .*rows or columns.*AdamW\(params, lr=1e-3\)",
    ),
    "the same under ZeRO": (
        gpt, TOKENS, Plan(dp=2, tp=2, zero=1), {"optimizer": adafactor}, r"ZeRO gives each rank a part.*AdamW",
    ),
    "one for matrices only": (
        gpt, TOKENS, Plan(tp=2), {"optimizer": torch.optim.Muon}, r"Muon only supports 2D.*AdamW\(params",
    ),
    "a layer's name": (
        gpt, TOKENS, Plan(tp=2, tensor=of_one("block*.mlp.upp")), {}, r"no module of the name 'block0.mlp.upp'. It has",
    ),
    "a part of a layer as a stage": (
        gpt, TOKENS, Plan(pp=2, tp=2, cut=["block0.mlp"]), {}, r"no layer of that name. Did you mean 'block0'",
    ),
    "a sequence that ranks do not divide": (
        gpt, SHORT, Plan(tp=2, sequence_parallel=True), {}, r"over 2 ranks.*\[8, 15, 16\]: pad it to 16",
    ),
    "the same along cp": (gpt, SHORT, Plan(cp=2), {}, r"s=15 tokens on cp=2.*s=14 or s=16 would do"),
    "in two pieces each": (
        gpt, [(x[:, :6], y[:, :6]) for x, y in TOKENS], Plan(cp=2, cp_order="zigzag"), {},
        r"s=6 tokens.*into two pieces each.*s=8 would do",
    ),
    "a sequence longer than the model's": (gpt, tokens(8, 32, 32), Plan(cp=2), {}, r"32 tokens.*length=16"),
    "a class for each sequence": (Classifier, CLASSES, Plan(cp=2), {"loss": F.cross_entropy}, r"train that with cp=1"),
    "sequences of what has none": (mlp, rows(), Plan(cp=2), {"loss": F.cross_entropy}, r"\[batch, s, ...\].*cp=1"),
    "sequence parallelism of what has none": (
        mlp, rows(), Plan(tp=2, sequence_parallel=True), {"loss": F.cross_entropy}, r"TensorPlan\(..., sequence=",
    ),
    "attention that is out of sight": (eager, NAMED, Plan(cp=2), {"loss": logits_loss}, r"attn_implementation='sdpa'"),
    "more micro-batches than samples": (
        gpt, TOKENS, Plan(pp=2, tp=2, microbatches=16), {}, r"16 micro-batches.*microbatches=8 works",
    ),
    "more stages than layers": (gpt, TOKENS, Plan(pp=8, tp=2), {}, r"8 stages.*4 layers.*At most pp=4 works"),
    "a loss that writes into divided logits": (
        gpt, TOKENS, Plan(tp=2), {"loss": writes_into_logits}, r"mul_ writes into the logits.*Make new ones",
    ),
    "nothing to divide": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3)), [(torch.randn(8, 3, 6), torch.randn(8, 4, 4))], Plan(tp=2),
        {"loss": F.mse_loss}, r"divides linear layers, and Sequential has none",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_refused_with_what_works(case: str) -> None:
    """Before any rank starts, and without a traceback from inside torch behind it."""
    make, data, plan, other, says = WRONG[case]
    how: dict[str, Any] = {
        "loss": next_token_loss,
        "optimizer": adamw,
        "steps": 1,
        "ranks": plan.ranks,
    } | other
    with pytest.raises(ValueError, match=f"(?s){says}") as caught:
        prepare(make(), data, plan, **how)
    error = caught.value
    assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)


@pytest.mark.parametrize(("fields", "says"), [
    ({"tp": 0}, r"tp is a whole number, 1 or more, such as in Plan\(tp=4\)"),
    ({"tp": 2.5}, r"Plan\(tp=2.5\)"),
    ({"tp": 2, "data_parallel": "dp"}, r"knows no other axis. What works together with them is Plan\(tp=2\)"),
    ({"dp": 2, "sequence_parallel": True}, r"tp=1. Either Plan\(dp=2, tp=2, sequence_parallel=True\)"),
    ({"tp": 2, "sequence_parallel": "yes"}, r"True, or False: Plan\(tp=2, sequence_parallel=True\)"),
    ({"cp": 2, "cp_order": "zig-zag"}, r"Plan\(cp=2, cp_order='zigzag'\)"),
    ({"tp": 2, "tensor": "auto"}, r"mk.tensor.find_tensor_plan\(model\)"),
    ({"dp": 2, "tp": 2, "zero": 1, "offload": "params"}, r"Plan\(dp=2, tp=2, zero=3, offload='params'\)"),
], ids=str)  # fmt: skip
def test_plans_that_cannot_be(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Plan(**fields)


MESH = Plan(pp=2, dp=2, tp=2, schedule="1f1b")


@pytest.mark.parametrize(("plan", "ranks", "nearest"), [
    (MESH, 4, Plan(pp=2, tp=2, schedule="1f1b")),
    (MESH, 16, Plan(pp=2, dp=4, tp=2, schedule="1f1b")),
    (MESH, 12, Plan(pp=2, dp=3, tp=2, schedule="1f1b")),
    (MESH, 6, Plan(pp=3, tp=2, schedule="1f1b")),
    (Plan(tp=2, sequence_parallel=True), 4, Plan(dp=2, tp=2, sequence_parallel=True)),
    (Plan(tp=4, sequence_parallel=True), 2, Plan(tp=2, sequence_parallel=True)),
    (Plan(dp=2, cp=2), 8, Plan(dp=4, cp=2)),
    (Plan(pp=2, cut=[1]), 4, Plan(pp=4)),
    (Plan(pp=2, dp=2, schedule="interleaved_1f1b", virtual_stages=2, microbatches=4), 1, Plan.serial(4)),
    (Plan(dp=2, data_parallel="dp"), 4, Plan(dp=4, data_parallel="dp")),
], ids=str)  # fmt: skip
def test_a_cluster_of_another_size_gets_the_nearest_plan(plan: Plan, ranks: int, nearest: Plan) -> None:
    """As many axes as can stay do."""
    with pytest.raises(ValueError) as caught:
        check_plan(plan, ranks)
    said = str(caught.value)
    assert f"mk.Cluster(ranks={plan.ranks}) fits it" in said
    pasted = eval(said.rpartition("or on this one: ")[2], {"mk": mk})  # as whoever reads it would
    assert pasted == nearest and pasted.ranks == ranks
