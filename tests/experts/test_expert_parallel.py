"""Experts divided over ranks: training equals serial training, whatever the routing, the mesh, and the ZeRO stage."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.errors import TraceError
from mpkit.models import GPT, MLP, MixtureOfExperts, next_token_loss
from mpkit.strategies.experts.divide import find_experts
from mpkit.strategies.prepare.prepare import prepare
from mpkit.strategies.reference.experts.balance import auxiliary_loss
from mpkit.trace import Trace
from tests.recipes import adamw, sgd
from tests.serial import Train, check_equal, same, serial
from tests.zoo.architectures import ARCHITECTURES, batch_of, build, loss_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")]


def gpt(**sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    given = {
        "vocab": 33, "layers": 2, "width": 12, "heads": 3, "length": 8, "experts": 4, "top_k": 2, **sizes,
    }  # fmt: skip
    return GPT(**given).double()


def texts(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randint(33, (size, 8)), torch.randint(33, (size, 8))) for size in sizes]


HOW: dict[str, Any] = {"loss": next_token_loss, "optimizer": adamw, "steps": 3, "max_grad_norm": 0.3}


class Biased(nn.Sequential):
    """Each token's first expert is the same, since the router's row for it is large and tokens are positive."""

    def __init__(self, favourite: int, top_k: int) -> None:
        torch.manual_seed(2)
        layer = MixtureOfExperts(6, experts=4, top_k=top_k, hidden=5)
        with torch.no_grad():
            layer.router.weight[favourite] = 5.0
        super().__init__(nn.Linear(6, 6), nn.Softplus(), layer, nn.Linear(6, 3))


@pytest.mark.parametrize(("favourite", "top_k", "zero"), [(3, 1, 0), (2, 2, 3)])
def test_all_tokens_to_one_expert(train: Train, favourite: int, top_k: int, zero: int) -> None:
    """With one choice a rank receives all rows, and the other none: its experts' gradients are 0, as in serial.

    The last batch has one token, and so one replica has none of its own.
    """
    torch.manual_seed(3)
    data = [(torch.rand(size, 6).double(), torch.randint(3, (size,))) for size in (5, 1)]
    how = {**HOW, "loss": F.cross_entropy, "steps": 4}
    check_equal(train, Biased(favourite, top_k).double(), data, mk.Plan(dp=2, zero=zero, ep=2), **how)


@pytest.mark.parametrize("plan", [
    mk.Plan(dp=2, tp=2, sequence_parallel=True, ep=4, etp=1),
    mk.Plan(pp=2, dp=2, ep=2, schedule="overlapped_1f1b", virtual_stages=1, microbatches=2),
], ids=repr)  # fmt: skip
@pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")
def test_the_matrix_of_bytes_is_that_of_the_tokens(train: Train, tmp_path: Path, plan: mk.Plan) -> None:
    """Each pair of ranks exchanged the rows that routers sent from one to the other; a call's parts are its payload."""
    run = train(
        gpt(heads=2, vocab=32), [(x % 32, y % 32) for x, y in texts(8, 8)], plan, **{**HOW, "steps": 2}
    )
    assert run.placement().part("block1.mlp.experts.up", 3) == {4: "expert 3", 2: "experts 2-3"}[plan.ep]
    rows = np.zeros((4, 4))
    for layer in run.trace.expert_load.sent:
        routes = run.token_routes(layer)
        for (i, sender), (j, receiver) in product(enumerate(routes.ranks), enumerate(routes.ranks)):
            rows[sender, receiver] += routes.matrix[i, j]
            assert f"rank {sender} has {routes.matrix[i].sum():.0f} rows" in routes.to_svg()
    np.fill_diagonal(rows, 0)
    # a row of 12 numbers of 8 bytes goes there and back, and its gradient
    expected = 2 * 12 * 8 * (rows + rows.T)
    # numbers of rows per expert, of 8 bytes: one of 4 experts' per call, layer of a rank and micro-batch
    counts = plan.microbatches * 2 / plan.pp * 8 * 4 / plan.ep
    expected[expected > 0] += counts
    for trace in (run.trace, Trace.load(run.trace.save(tmp_path / "run.mpkit"))):
        timeline = mk.Timeline.of(trace)
        assert timeline.comm_matrix("ep").by_axis["ep"].tolist() == expected.tolist()
        volumes = [timeline.comm_volume(rank=rank) for rank in range(4)]
        wire = [next(row.wire for row in volume.rows if row.axis == "ep") for volume in volumes]
        assert wire == expected.sum(axis=1).tolist()
        for rank in trace.ranks:
            sent = np.bincount(rank.sent_parts["op"], rank.sent_parts["bytes"], len(rank.ops))
            assert sent[sent > 0].tolist() == rank.ops["bytes"][sent > 0].tolist()
    # ---- a trace of an older mpkit knows the payload of each call alone
    older = replace(
        run.trace, ranks=[replace(each, sent_parts=each.sent_parts[:0]) for each in run.trace.ranks]
    )
    timeline = mk.Timeline.of(older)
    sent = [
        next(row for row in timeline.comm_volume(rank=rank).rows if row.axis == "ep") for rank in range(4)
    ]
    assert all(row.wire == row.even for row in sent)
    assert sum(row.wire for row in sent) == pytest.approx(sum(row.expected or 0 for row in sent))
    # ---- parts that no run sends
    for name, value in (("op", 0), ("member", 4), ("bytes", 2**40)):
        damaged = run.trace.ranks[0].sent_parts.copy()
        damaged[name][0] = value
        ranks = [replace(run.trace.ranks[0], sent_parts=damaged), *run.trace.ranks[1:]]
        with pytest.raises(TraceError, match=f"rank 0's part of an all-to-all number 0 has {name}={value}"):
            replace(run.trace, ranks=ranks).check()


def test_models_that_cannot_be() -> None:
    how = {**HOW, "ranks": 4}
    with pytest.raises(ValueError, match=r"(?s)MLP has none that mpkit knows.*Without experts: ep=1"):
        prepare(
            MLP(6, 3),
            [(torch.rand(4, 6), torch.zeros(4).long())],
            mk.Plan(dp=4, ep=2),
            **{**how, "loss": F.cross_entropy},
        )
    with pytest.raises(ValueError, match=r"equally many of the 6 experts of block0.mlp.experts: ep=2 can"):
        prepare(gpt(experts=6), texts(4), mk.Plan(dp=4, ep=4), **how)
    drawing = gpt()
    drawing.block0.mlp.experts.register_module("dropout", nn.Dropout(0.1))
    with pytest.raises(ValueError, match=r"has a dropout, which draws for the rows of its experts"):
        prepare(drawing, texts(4), mk.Plan(dp=4, ep=4), **how)
    with pytest.raises(ValueError, match=r"top_k=5\): a token visits top_k different experts.*top_k=4"):
        MixtureOfExperts(8, experts=4, top_k=5)


@pytest.mark.parametrize(
    "plan", [mk.Plan(cp=2, tp=2, sequence_parallel=True, ep=2, zero=3, recompute="every=2")], ids=repr
)
def test_the_load_of_experts_is_that_of_serial_training(train: Train, plan: mk.Plan) -> None:
    """Each choice is counted once, whoever sees the token, and however often its forward is computed."""
    data = texts(7, 7)
    one, load = (
        train(gpt(heads=2), data, p, **HOW, evaluate=texts(3)).expert_load for p in (mk.Plan.serial(), plan)
    )
    assert sorted(load.rows) == ["block0.mlp.experts", "block1.mlp.experts"] and load.first == 0
    for layer, rows in load.rows.items():
        assert rows.tolist() == one.rows[layer].tolist() and rows.sum(axis=1).tolist() == [7 * 8 * 2] * 3
    assert len(load.to_dataframe()) == 2 * 3 * 4
    assert "block1.mlp.experts  " in str(load) and "x mean" in str(load)
    assert load.to_svg().count("<title>step 2, expert 3") == 2


def test_a_mixture_runs_under_autocast() -> None:
    torch.manual_seed(0)
    layer, x = MixtureOfExperts(12, experts=3, top_k=3), torch.randn(3, 8, 12, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        made = layer(x)
    made.sum().backward()
    assert made.dtype == torch.float32 and x.grad is not None
    exact = layer(x)
    assert (made - exact).abs().max() < 2e-2 * exact.abs().max()


# ---- transformers' mixtures of experts, as they are: their experts have the interface that mpkit's have.

ZOO = {one.name: one for one in ARCHITECTURES}
soak = partial(pytest.param, marks=pytest.mark.soak)


@pytest.mark.parametrize(("name", "plan"), [
    soak("mixtral", mk.Plan(dp=2, tp=2, ep=2)),  # whose own plan divides experts along tp, if ep does not
    soak("mixtral", mk.Plan(dp=2, tp=2, ep=2, etp=2, zero=1)),
    ("gpt_oss", mk.Plan(pp=2, dp=2, schedule="1f1b", microbatches=2, ep=2)),  # with biases
    soak("qwen2_moe", mk.Plan(dp=2, zero=3, ep=2)),  # with a shared expert
    soak("qwen3_moe", mk.Plan(cp=2, ep=2)),
    soak("olmoe", mk.Plan(dp=4, ep=4)),
    soak("granite_moe", mk.Plan(dp=4, zero=1, ep=2)),
])  # fmt: skip
def test_mixtures_of_transformers_equal_serial_training(train: Train, name: str, plan: mk.Plan) -> None:
    task, model = ZOO[name].task, build(ZOO[name])
    if (
        plan.tp > 1
    ):  # sums in another order, and Mixtral's norms and router compute in 32 bits whatever its weights are
        model.float()
    data = [batch_of(task) for _ in range(2)]
    check_equal(
        train, model, data, plan,
        steps=2, loss=loss_of(task), optimizer=sgd, microbatches=plan.microbatches,
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granite_moe", "gpt_oss", "deepseek_v3"]
)
def test_their_experts_are_found(name: str) -> None:
    """In DeepSeek's first layer is an MLP."""
    layers = len(find_experts(build(ZOO[name])))
    assert layers == 4 - (name == "deepseek_v3")


class WithRouters(nn.Module):
    """A mixture that returns what its routers said, samples first, so that an auxiliary loss can see it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build(
            replace(ZOO["mixtral"], settings=ZOO["mixtral"].settings | {"output_router_logits": True})
        )

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        out = self.inner(input_ids=input_ids, use_cache=False)
        said = [each.unflatten(0, input_ids.shape) for each in out.router_logits]
        return out.logits, torch.stack(said, 2)  # [batch, time, layers, experts]


def with_auxiliary_loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    logits, said = outputs
    p = said.flatten(0, 1).softmax(-1)
    chosen = p.topk(2).indices
    losses = [auxiliary_loss(p[:, layer], chosen[:, layer]) for layer in range(p.shape[1])]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.1 * sum(losses)


def test_an_auxiliary_loss_sees_the_whole_batch(train: Train) -> None:
    """Computed in parts it would be another loss, and is rejected; `whole_batch_loss` gathers what the routers said."""
    data = [(torch.randint(40, (6, 8)), torch.randint(40, (6, 8))) for _ in range(2)]
    how: dict[str, Any] = {"steps": 3, "optimizer": sgd}
    model, plan = WithRouters(), mk.Plan(dp=2, ep=2)
    with pytest.raises(
        mk.errors.NotSerial, match=r"(?s)needs the whole batch.*loss=mk.whole_batch_loss\(your_loss\)"
    ):
        train(model, data, plan, loss=with_auxiliary_loss, **how)
    losses, weights = serial(model, data, loss=with_auxiliary_loss, **how)
    run = train(model, data, plan, loss=mk.whole_batch_loss(with_auxiliary_loss), **how)
    same(run, losses, weights, rtol=1e-7, atol=1e-9)  # transformers' routers compute in 32 bits
