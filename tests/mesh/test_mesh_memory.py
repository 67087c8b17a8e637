"""What ranks of a mesh hold, by the ledger, against the papers.

Activations of a transformer layer in 16 bits, in bytes; N = b s (Korthikanti et al. 2022, section 4, equations 1 to 4):

                          serial                     t ranks                     with sequence parallelism
    the kit's block       s b h (32 + x)             s b h (8 + 24/t + x_t)            s b h (32 + x) / t

The kit's block keeps, in elements of N h, with dropout 0 and attention that makes no scores in memory:

    norm1     its input 1, and 2 numbers per token
    qkv       its input 1                                       shared by t ranks: q, k, v 3
    attention its output 1/t, which is also the input of `out`; the log-sum-exp, a number in fp32 a token and head
    norm2     its input 1, and 2 numbers per token
    up        its input 1                                       shared: its output 4, the input of GELU
    out       its input 4/t

So 4 + 12/t of N h, two bytes each: 8 + 24/t; and x = 2 x 2 x 2/h + 4 a/h, of which attention's part is shared. Dropout
would add 2 masks: the paper's 34. Selective recomputation drops the log-sum-exp, full recomputation all but 2 s b h.
"""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from tests.mesh.test_mesh_training import tokens
from tests.recipes import adamw, sgd
from tests.serial import Train

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")]

soak = partial(pytest.param, marks=pytest.mark.soak)
B, S, H, A, VOCAB = 2, 32, 32, 4, 32
"""b, of a micro-batch; s, h and a."""


def activations(train: Train, model: nn.Module, **how: Any) -> list[int]:
    """By rank the most that it held in a step."""
    plan = mk.Plan(precision="bf16", **how)
    data = tokens(B * plan.microbatches, S, VOCAB)
    run = train(model, data, plan, loss=next_token_loss, optimizer=sgd, steps=2)
    return [held["activations"] for held in run.timeline().peak_memory]


def gpt(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocab=VOCAB, layers=layers, width=H, heads=A, length=S)


def of_a_layer(train: Train, make: Any, **how: Any) -> list[float]:
    """By rank bytes of a layer, in s b h: what two layers more add, for each that the rank has."""
    few, many = (activations(train, make(layers), **how) for layers in (2, 4))
    more = 2 / how.get("pp", 1) * S * B * H
    return [(after - before) / more for before, after in zip(few, many, strict=True)]


def kit(t: int, divided: bool, lse: bool = True) -> float:
    """Bytes of a layer of the kit's GPT, in s b h."""
    whole = 8 + 2 * 2 * 2 / H  # inputs of norms and of column layers; mean and 1/deviation of norms
    return whole / (t if divided else 1) + 24 / t + lse * 4 * A / H / t


@pytest.mark.parametrize(("how", "wanted"), [
    soak({}, kit(1, False)),
    soak({"recompute": "selective"}, kit(1, False, lse=False)),
    soak({"tp": 2}, kit(2, False)),
    soak({"tp": 4}, kit(4, False)),
    soak({"tp": 2, "sequence_parallel": True}, kit(2, True)),
    soak({"tp": 4, "sequence_parallel": True}, kit(4, True)),
    ({"tp": 2, "sequence_parallel": True, "recompute": "selective"}, kit(2, True, lse=False)),
], ids=str)  # fmt: skip
def test_a_layer_of_the_kit_keeps_what_the_formula_says(
    train: Train, how: dict[str, Any], wanted: float
) -> None:
    found = of_a_layer(train, gpt, **how)
    assert found == pytest.approx([wanted] * len(found), rel=0.01)


REPLICAS: list[dict[str, Any]] = [
    {"dp": 2, "tp": 2}, {"cp": 2, "tp": 2}, {"pp": 2, "dp": 2, "cut": ["block1"]},
    {"dp": 2, "precision": "bf16"},
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "zero"), [
    ((mesh, zero) if zero == 3 - number % 3 or ("precision" in mesh and zero == 2) else soak(mesh, zero))
    for number, mesh in enumerate(REPLICAS)
    for zero in range(4)
], ids=str)  # fmt: skip
def test_states_are_divided_by_every_axis(train: Train, mesh: dict[str, Any], zero: int) -> None:
    """To the byte: layers over tp, stages over pp, and by ZeRO over dp x cp (Rajbhandari et al. 2020, figure 1).

    With Adam 4 psi, 4 psi and 8 psi in fp32; 2 psi, 2 psi and 12 psi in 16 bits.
    """
    plan = mk.Plan(zero=zero, **mesh)
    model, data = gpt(2), tokens(4, S, VOCAB)
    run = train(model, data, plan, loss=next_token_loss, optimizer=adamw, steps=2)
    divided = ("qkv", "up", "attention.out.weight", "mlp.out.weight", "tokens", "logits")
    n, size, states = plan.dp * plan.cp, *((4, 8) if plan.precision == "full" else (2, 12))
    for rank, held in enumerate(run.timeline().peak_memory):
        mine = [
            p.numel() // (plan.tp if any(d in name for d in divided) else 1)
            for name, p in model.named_parameters()
            if plan.pp == 1 or (name.split(".")[0] in ("block1", "head")) == (plan.mesh.place(rank).pp == 1)
        ]
        psi = sum(mine)
        assert psi % n == 0, "so that no padding is needed"
        assert held["params"] == size * psi // (n if zero == 3 else 1)
        assert held["grads"] == size * psi // (n if zero >= 2 else 1)
        assert held["optimizer"] == states * psi // (n if zero >= 1 else 1)


class Holding:
    """A loss in whose ranks the backend holds every tensor that it has reduced, as gloo's thread does for a moment."""

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        if not self.__dict__:
            self.held: list[Tensor] = []
            self.reduce, dist.all_reduce = dist.all_reduce, self.all_reduce
        return next_token_loss(logits, targets)

    def all_reduce(self, tensor: Tensor, *args: Any, **how: Any) -> Any:
        self.held.append(tensor)
        return self.reduce(tensor, *args, **how)


def test_a_gradient_never_lives_twice(train: Train) -> None:
    """Also where buckets are rebuilt after the first step while the backend still holds the old ones."""
    model, plan = gpt(2), mk.Plan.ddp(2, bucket_mb=0.01)
    psi = sum(parameter.numel() for parameter in model.parameters())
    run = train(model, tokens(4, S, VOCAB), plan, loss=Holding(), optimizer=sgd, steps=3)
    assert [held["grads"] for held in run.timeline().peak_memory_of_run] == [4 * psi] * 2
