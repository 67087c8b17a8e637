"""Experts divided over ranks: training equals serial training, whatever the routing, the mesh, and the ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.common.units import percent
from mpkit.errors import TraceError
from mpkit.models import GPT, MLP, MixtureOfExperts, next_token_loss
from mpkit.plan.mesh import Mesh
from mpkit.strategies.prepare.prepare import prepare
from mpkit.trace import Trace
from tests.experts.planted import EXPERT_FAULTS, PlantedInExperts
from tests.serial import Train, check_equal

pytestmark = pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-6)


def gpt(**sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    given = {
        "vocab": 33,
        "layers": 2,
        "width": 12,
        "heads": 3,
        "length": 8,
        "experts": 4,
        "top_k": 2,
        **sizes,
    }
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


# ---- which ranks -------------------------------------------------------------------------------------------------


def test_groups_are_those_of_the_paper() -> None:
    """arXiv 2504.14960, listing 1: 64 ranks, tp 2, cp 2, ep 2, with pp outermost here, where etp is tp, then 1."""
    mesh = Mesh(pp=2, dp=8, cp=2, tp=2, ep=2)
    assert mesh.group(0, "ep") == mesh.group(0, "cp") == (0, 2)
    assert mesh.group(0, "edp") == mesh.group(0, "dp") == tuple(range(0, 32, 4))
    folded = Mesh(pp=2, dp=8, cp=2, tp=2, ep=8, etp=1)
    assert folded.group(0, "ep") == tuple(range(8)) and folded.group(0, "edp") == (0, 8, 16, 24)
    assert Mesh(dp=6, ep=3).groups("ep", "edp") == [(0, 1, 2, 3, 4, 5)]
    assert Mesh(dp=4, dp_replicate=2, ep=2).groups("dp_replicate", "edp") == [(0, 2), (1, 3)]


# ---- what is sent ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan",
    [
        mk.Plan(dp=4, zero=1, microbatches=2, ep=2),
        mk.Plan(pp=2, dp=2, schedule="1f1b", microbatches=2, recompute="full", ep=2),
        mk.Plan(dp=2, tp=2, sequence_parallel=True, ep=2, etp=1),
        mk.Plan(pp=2, dp=2, tp=2, schedule="1f1b", microbatches=2, recompute="full", ep=2, etp=2),
    ],
    ids=repr,
)
def test_bytes_are_those_of_the_formula(train: Train, plan: mk.Plan) -> None:
    """Whatever the routing: each rank sends T k rows, and as many come back; on average 1/ep of them stay."""
    how = {**HOW, "max_grad_norm": None, "steps": 2}
    run = train(gpt(heads=2, vocab=32), [(x % 32, y % 32) for x, y in texts(8, 8)], plan, **how)
    rows = {row.axis: row for row in run.timeline().comm_volume().rows if row.ratio is not None}
    assert "ep" in rows and all(
        row.ratio == pytest.approx(1.0, rel=2e-3) for row in rows.values() if row.axis != "ep"
    )
    assert rows["ep"].even == pytest.approx(rows["ep"].expected, rel=2e-3)
    layers, tokens = (
        2 / plan.pp,
        8 * 8 / plan.dp / (plan.tp if plan.sequence_parallel and plan.etp != plan.tp else 1),
    )
    per_layer = 4 + 2 * (plan.recompute == "full")
    counts = 4 * 8 * plan.microbatches * (per_layer / 2 - 1)
    sent = layers * (per_layer * tokens * 2 * 12 * 8 + counts) / 2
    assert rows["ep"].even == pytest.approx(sent, rel=1e-12)


@pytest.mark.parametrize(
    "plan",
    [
        mk.Plan(dp=2, tp=2, sequence_parallel=True, ep=4, etp=1),
        mk.Plan(pp=2, dp=2, ep=2, schedule="overlapped_1f1b", virtual_stages=1, microbatches=2),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")
def test_the_matrix_of_bytes_is_that_of_the_tokens(train: Train, tmp_path: Path, plan: mk.Plan) -> None:
    """Each pair of ranks exchanged the rows that routers sent from one to the other; a call's parts are its payload."""
    run = train(
        gpt(heads=2, vocab=32), [(x % 32, y % 32) for x, y in texts(8, 8)], plan, **{**HOW, "steps": 2}
    )
    rows = np.zeros((4, 4))
    for layer in run.trace.expert_load.sent:
        routes = run.token_routes(layer)
        for (i, sender), (j, receiver) in product(enumerate(routes.ranks), enumerate(routes.ranks)):
            rows[sender, receiver] += routes.matrix[i, j]
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
    # ---- parts that no run sends
    for name, value in (("op", 0), ("member", 4), ("bytes", 2**40)):
        damaged = run.trace.ranks[0].sent_parts.copy()
        damaged[name][0] = value
        ranks = [replace(run.trace.ranks[0], sent_parts=damaged), *run.trace.ranks[1:]]
        with pytest.raises(TraceError, match=f"rank 0's part of an all-to-all number 0 has {name}={value}"):
            replace(run.trace, ranks=ranks).check()


# ---- what is rejected --------------------------------------------------------------------------------------------


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


# ---- the load of experts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan",
    [
        mk.Plan(cp=2, tp=2, sequence_parallel=True, ep=2, zero=3, recompute="every=2"),
    ],
    ids=repr,
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


@pytest.mark.parametrize("fault", EXPERT_FAULTS)
def test_the_proof_finds_what_is_wrong_with_experts(
    clusters: Callable[[int], mk.Cluster], fault: str
) -> None:
    how = {**HOW, "loss": PlantedInExperts(next_token_loss, fault), "verify": "all"}
    run = clusters(4).train(gpt(), texts(8, 8), mk.Plan(dp=4, ep=2), **how)
    with pytest.raises(mk.errors.NotSerial, match=r"step [12] is not that of serial training"):
        run.wait()


def test_a_mixture_runs_under_autocast() -> None:
    torch.manual_seed(0)
    layer, x = MixtureOfExperts(12, experts=3, top_k=3), torch.randn(3, 8, 12, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        made = layer(x)
    made.sum().backward()
    assert made.dtype == torch.float32 and x.grad is not None
    exact = layer(x)
    assert (made - exact).abs().max() < 2e-2 * exact.abs().max()


def test_tokens_travel_to_the_ranks_of_their_experts(train: Train) -> None:
    model, (batch,) = gpt(heads=2), texts(8)
    run = train(model, [batch], mk.Plan(dp=4, ep=2), **HOW)
    routes = run.token_routes("block1", step=0)
    # ---- what the router of the untrained model chooses for each rank's samples
    chosen: list[Tensor] = []
    experts = model.get_submodule("block1.mlp.experts")
    experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    for rank in range(4):
        model(batch[0][rank::4])
    counts = torch.stack([each.flatten().bincount(minlength=4) for each in chosen])
    assert routes.rows.tolist() == counts.tolist() and routes.ranks == (0, 1, 2, 3)
    # ---- ranks 0 and 1 divide the experts, and 2 and 3: two each
    halves = counts.view(4, 2, 2).sum(2).tolist()
    assert routes.matrix.tolist() == [
        [*halves[0], 0, 0],
        [*halves[1], 0, 0],
        [0, 0, *halves[2]],
        [0, 0, *halves[3]],
    ]
    stay = halves[0][0] + halves[1][1] + halves[2][0] + halves[3][1]
    assert routes.moved_share == pytest.approx(1 - stay / counts.sum().item())
    assert f"{routes.moved_share:.0%} of the rows leave their rank" in str(routes)
    assert routes.to_svg().count(" rows from rank ") == int((counts > 0).sum())
    assert routes.to_dataframe()["rows"].sum() == counts.sum().item()
    # ---- without expert parallelism none leaves
    assert train(gpt(heads=2), [batch], mk.Plan.ddp(2), **HOW).token_routes("block0").moved_share == 0
    with pytest.raises(
        ValueError, match=r"token_routes\('head'\): no layer is called so; .*block0.mlp.experts"
    ):
        run.token_routes("head")
    with pytest.raises(ValueError, match=r"token_routes\(0\): a layer is a name"):
        run.token_routes(0, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="several layers are called so"):
        run.token_routes("experts")
    with pytest.raises(ValueError, match=r"step=9\): the trace has 3 steps, 0 to 2"):
        run.token_routes(step=9)


def test_the_ratio_of_a_rank_says_how_busy_its_experts_are(train: Train) -> None:
    """A rank returns the rows that it received. All together handle what the formula says, to clip gradients too."""
    plan, how = mk.Plan(dp=2, tp=2, sequence_parallel=True, ep=2, etp=2), {**HOW, "steps": 2}
    run = train(gpt(heads=2, vocab=32), [(x % 32, y % 32) for x, y in texts(8, 8)], plan, **how)
    whole = run.timeline().comm_volume()
    routed = next(row for row in whole.rows if row.axis == "ep")
    assert routed.even == pytest.approx(routed.expected, rel=2e-3) and abs(routed.moved_more) > 1e-3
    assert whole.note.startswith(f"ep: of a rank's rows {percent(abs(routed.moved_more))} ")
    assert all(row.ratio == pytest.approx(1.0, rel=2e-3) for row in whole.rows if row.axis != "ep"), whole
    assert next(row.words for row in whole.rows if row.axis == "dp x tp").startswith("the square of the grad")
    computed = [run.trace.expert_load.sent[layer][-1] for layer in run.trace.expert_load.sent]
    first = sum(float(rows[:, : rows.shape[1] // 2].sum()) for rows in computed)
    more = first / (sum(float(rows.sum()) for rows in computed) / 2) - 1
    volume = run.timeline().comm_volume(rank=0)  # which has the first half of the experts
    row = next(row for row in volume.rows if row.axis == "ep")
    assert abs(more) > 0.01 and row.routed_more == pytest.approx(more, rel=0.01)
    assert f"of rank 0 received {percent(abs(more))} {'more' if more > 0 else 'fewer'} than the mean" in str(
        volume
    )
    assert "rank 0 received" in volume._repr_html_()


def test_a_router_learns_if_a_token_visits_one_expert() -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(width=8, experts=4, top_k=1)
    layer(torch.randn(16, 8)).square().sum().backward()
    assert layer.router.weight.grad is not None
    assert layer.router.weight.grad.abs().max() > 1e-6
