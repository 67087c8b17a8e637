"""Experts with several slots: training equals serial training, and rows and time change as predicted."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.common.torch_private import _disable_current_modes
from mpkit.devices.hardware import Device
from mpkit.models import MixtureOfExperts, place_experts
from mpkit.prediction.dry_run.memory import played_memory
from mpkit.strategies.experts.copies import choose_slots
from mpkit.strategies.models.experts import owned_experts
from mpkit.strategies.prepare.prepare import prepare
from mpkit.strategies.runtime.train import Training
from mpkit.trace.record import recorder
from mpkit.trace.record.counted_clock import CountingMode
from tests.experts.planted import COPY_FAULTS, PlantedInExperts
from tests.experts.test_expert_parallel import HOW, gpt, texts
from tests.experts.test_expert_parallel_models import ZOO, Plain, sgd
from tests.proof.planted import Planted
from tests.serial import EXACT, Train, check_equal, same, serial
from tests.zoo.architectures import batch_of, build, loss_of

pytestmark = pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")

ORDERS = {"block0.mlp.experts": [0, 0, 1, 0, 2, 3], "block1.mlp.experts": [3, 0, 1, 3, 2, 0, 3, 3]}
"""The second rank of two borrows expert 0 in block 0; in block 1 each borrows one of the other's."""


def copied(**sizes: Any) -> nn.Module:
    return place_experts(gpt(**sizes), ORDERS)


soak = pytest.mark.soak


@pytest.mark.parametrize(
    "plan",
    [
        mk.Plan(dp=4, ep=2),
        mk.Plan(dp=2, zero=2, microbatches=3, ep=2),
        mk.Plan(dp=4, zero=3, ep=2, microbatches=2, recompute="full"),
        mk.Plan(pp=2, dp=2, schedule="zbv", virtual_stages=2, microbatches=4, ep=2),
        pytest.param(mk.Plan(dp=4, zero=3, dp_shard=2, ep=2), marks=soak),
        pytest.param(mk.Plan(dp=2, cp=2, zero=1, ep=2), marks=soak),
        pytest.param(mk.Plan(dp=2, tp=2, sequence_parallel=True, zero=1, ep=2), marks=soak),
        pytest.param(mk.Plan(cp=2, tp=2, sequence_parallel=True, ep=2, etp=1, zero=1), marks=soak),
        pytest.param(mk.Plan(dp=2, tp=2, sequence_parallel=True, ep=2, etp=2, recompute="full"), marks=soak),
        pytest.param(mk.Plan(pp=2, dp=2, schedule="dualpipev", microbatches=4, ep=2), marks=soak),
    ],
    ids=repr,
)
def test_training_with_copies_equals_serial_training(train: Train, plan: mk.Plan) -> None:
    """Clipped: the norm counts each expert once."""
    sizes = {"heads": 2} if plan.tp > 1 else {"layers": 4} if plan.schedule == "dualpipev" else {}
    run = check_equal(train, copied(**sizes), texts(7, 7), plan, **HOW)
    assert run.proof is not None and str(run.proof).startswith("equal to serial training")
    load = run.expert_load
    for layer, order in ORDERS.items():
        assert load.slots[layer].shape[2] == len(order) and load.rows[layer].shape[1] == 4


def test_other_peoples_experts(train: Train) -> None:
    """Experts in a submodule, with biases; and a mixture of transformers, whose experts know their number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Plain(), Plain(), nn.Linear(6, 3)).double()
    place_experts(model, {"1.experts": [2, 2, 0, 1, 2, 3], "2.experts": [3, 1, 0, 2]})
    data = [(torch.randn(5, 6).double(), torch.randint(3, (5,))) for _ in range(2)]
    check_equal(train, model, data, mk.Plan(dp=2, zero=2, ep=2), loss=F.cross_entropy, optimizer=sgd, steps=3)
    mixtral = build(ZOO["mixtral"])
    name, experts = next((n, m) for n, m in mixtral.named_modules() if n.endswith("experts"))
    count = len(next(experts.parameters()))
    place_experts(mixtral, {name: [*range(count), 0, count - 1]})
    task = ZOO["mixtral"].task
    data = [batch_of(task) for _ in range(2)]
    check_equal(train, mixtral, data, mk.Plan(dp=2, ep=2), steps=2, loss=loss_of(task), optimizer=sgd)


@pytest.mark.parametrize("zero", [0, 3])
def test_frozen_and_shared_experts(train: Train, zero: int) -> None:
    model = gpt(layers=3)
    first, second, third = (model.get_submodule(f"block{i}.mlp") for i in range(3))
    third.experts.up = first.experts.up
    second.experts.up.requires_grad_(False)
    order = ORDERS["block0.mlp.experts"]
    place_experts(model, {f"block{i}.mlp.experts": order for i in range(3)})
    check_equal(train, model, texts(5), mk.Plan(dp=2, zero=zero, ep=2), **HOW)


def test_a_checkpoint_is_taken_up_with_another_placement(train: Train, tmp_path: Path) -> None:
    """With copies under ZeRO-1, then with others under ep=4, then none: the states of each expert are saved once."""
    model, data = gpt(), texts(6, 6)
    stages: list[tuple[mk.Plan, dict[str, list[int]]]] = [
        (mk.Plan(dp=2, zero=1, ep=2), ORDERS),
        (
            mk.Plan(dp=4, ep=4),
            {"block0.mlp.experts": [0, 2, 1, 2, 2, 3, 2, 1], "block1.mlp.experts": [3, 2, 1, 0]},
        ),
        (mk.Plan.serial(), ORDERS),
    ]
    losses: list[float] = []
    for i, (plan, orders) in enumerate(stages):
        resume = {"resume_from": tmp_path} if i else {}
        run = train(
            place_experts(model, orders), data, plan, **{**HOW, "steps": 2 * i + 2},
            checkpoint_every=2, checkpoint_dir=tmp_path, **resume,
        )  # fmt: skip
        losses += run.losses
    expected, weights = serial(model, data, **{**HOW, "steps": 6})
    assert losses == pytest.approx(expected, rel=EXACT["rtol"])
    same(run, expected[4:], weights, **EXACT)


def test_evaluation_sees_the_new_weights(train: Train) -> None:
    how: dict[str, Any] = {**HOW, "evaluate": texts(3, 1), "every": 1, "ema": 0.8}
    runs = [train(copied(), texts(6, 5), plan, **how) for plan in (mk.Plan.serial(), mk.Plan(dp=2, ep=2))]
    one, two = ([run.metrics["eval loss"][step] for step in (0, 1, 2)] for run in runs)
    assert one == pytest.approx(two, rel=1e-8)
    torch.testing.assert_close(runs[0].ema_state_dict(), runs[1].ema_state_dict(), **EXACT)


# ---- the split ---------------------------------------------------------------------------------------------------


def test_rows_are_split_evenly() -> None:
    chosen, order = torch.randint(5, (64, 2)), [0, 3, 0, 1, 2, 3, 0, 3]
    slots = choose_slots(chosen, order, rank=1)
    assert (slots[chosen == 4] == len(order)).all(), "a dropped choice goes to no slot"
    assert [order[slot] for slot in slots[chosen < 4].tolist()] == chosen[chosen < 4].tolist()
    rows = slots.flatten().bincount(minlength=8)
    for expert in range(4):
        of = [int(rows[slot]) for slot, held in enumerate(order) if held == expert]
        assert max(of) - min(of) <= 1
    # ---- another rank begins with another copy, so that all together are about as busy
    one = torch.zeros(1, 1, dtype=torch.long)
    assert [choose_slots(one, order, rank).item() for rank in range(4)] == [0, 2, 6, 0]


@pytest.mark.parametrize("seed", range(4))
def test_ranks_own_equally_many(seed: int) -> None:
    """Where that is possible a rank owns what is in its slots, and each expert has one owner."""
    draw = np.random.default_rng(seed)
    order = [*range(8), *draw.integers(0, 8, 8).tolist()]
    draw.shuffle(order)
    owned = owned_experts(order, 8, 4)
    assert sorted(e for each in owned for e in each) == list(range(8)) and {len(each) for each in owned} == {
        2
    }
    assert owned_experts([0] * 5 + [1, 2, 3], 4, 2) == [
        (0, 3),
        (1, 2),
    ]  # a rank with slots for one expert alone


class Hot(nn.Sequential):
    """A token's expert is that of its first four features that is 1."""

    def __init__(self, width: int = 8) -> None:
        torch.manual_seed(2)
        layer = MixtureOfExperts(width, experts=4, top_k=1, hidden=64)
        with torch.no_grad():
            layer.router.weight.zero_()
            layer.router.weight[:, :4] = 50 * torch.eye(4)
        super().__init__(layer, nn.Linear(width, 3))


def hot_batch() -> tuple[Tensor, Tensor]:
    """96 tokens, of which half go to expert 0."""
    torch.manual_seed(3)
    x = torch.randn(96, 8)
    x[:, :4] = F.one_hot(torch.tensor([0] * 6 + [1, 1, 2, 2, 3, 3]).repeat(8), 4)
    return x.double(), torch.randint(3, (96,))


class Counted(CountingMode):
    """Counts what operators compute, with real tensors, which answer when they are read."""

    def _answer(self, tensor: Tensor) -> bool | int | float:
        with _disable_current_modes():
            return tensor.item()


class OnCountedTime(Planted):
    """A loss; where it arrives on a rank, ops take the time of their FLOPs on a device, whatever the machine is."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not dist.is_initialized():
            return
        recorder._NEAR = 0  # read the clock at each op, however short it is
        original, began = Training.step, time.monotonic_ns()
        counting = Counted(Device("slow", {"float32": 1e6}, 1e15))

        def step(training: Training, number: int) -> None:
            training._record._thread_time = counting.now
            training._record._now = lambda: began + counting.now()
            with counting:  # type: ignore[no-untyped-call]
                original(training, number)

        Training.step = step  # type: ignore[method-assign]


def test_the_rows_of_the_busiest_rank_are_those_predicted(train: Train) -> None:
    """The same routing: predicted from a run without copies, then counted in one with copies; and so is the time."""
    how: dict[str, Any] = {"loss": OnCountedTime(F.cross_entropy, ""), "optimizer": sgd, "steps": 2}
    data, plan = [hot_batch()], mk.Plan(dp=2, ep=2)
    before = train(Hot().double(), data, plan, **how)
    balance = before.expert_load.balance(6, gpus=2)
    (layer,) = balance.layers
    assert layer.load_before.tolist() == [64, 32] and layer.load_after.tolist() == [48, 48]
    after = train(place_experts(Hot().double(), balance.orders), data, plan, **how)
    same(after, *serial(Hot().double(), data, **{**how, "loss": F.cross_entropy}), **EXACT)
    for run, load in ((before, layer.load_before), (after, layer.load_after)):
        routes = run.token_routes()
        assert routes.matrix.sum(axis=0).tolist() == load.tolist()
    assert after.expert_load.rows["0.experts"].tolist() == before.expert_load.rows["0.experts"].tolist()
    # ---- the step is faster, but for the router, the head and what copies send
    assert balance.time_ratio == 0.75
    assert after.timeline().step_time / before.timeline().step_time == pytest.approx(0.75, abs=0.02)
    # ---- how the rows of copies are shown
    routes, order = after.token_routes(), balance.orders["0.experts"]
    assert routes.experts == tuple(order) and "expert 0 on rank 1" in routes.to_svg()
    assert routes.to_dataframe().groupby("expert")["rows"].sum().tolist() == [48, 16, 16, 16]
    # ---- the next balance begins here, and has nothing to gain
    again = after.expert_load.balance(6, gpus=2)
    assert again.layers[0].load_before.tolist() == [48, 48] and (again.time_ratio, again.moves) == (1, 0)
    assert "one of 3 copies" in again.to_svg()
    assert after.expert_load.balance(4, gpus=2).time_ratio > 1, "without copies it would be slower again"


# ---- what is sent and held ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan", [mk.Plan(dp=4, zero=2, microbatches=2, ep=2), mk.Plan(pp=2, dp=2, schedule="1f1b", microbatches=2, ep=2)],
    ids=repr,
)  # fmt: skip
def test_bytes_are_those_of_the_formula(train: Train, plan: mk.Plan) -> None:
    """Each borrowed expert is sent once per step, and its gradient returned: as many bytes more as the formula says."""
    how, sent = {**HOW, "max_grad_norm": None, "steps": 2}, []
    for model in (copied(heads=2, vocab=32), gpt(heads=2, vocab=32)):
        run = train(model, [(x % 32, y % 32) for x, y in texts(8, 8)], plan, **how)
        rows = {row.axis: row for row in run.timeline().comm_volume().rows if row.expected}
        sent.append(rows.pop("ep"))  # the bytes of rows depend on the routing
        assert all(row.ratio == pytest.approx(1.0, rel=2e-3) for row in rows.values()), rows
    with_copies, without = sent
    assert "2 w a copy" in with_copies.symbols and with_copies.expected and without.expected
    more = with_copies.expected - without.expected
    counts = 8 * (14 - 8) * plan.microbatches / plan.pp  # of the rows of each slot, int64; half of them leave
    assert with_copies.payload - without.payload == pytest.approx(more + counts / 2, rel=1e-9)


def test_a_played_training_holds_copies() -> None:
    """On fake tensors: beside its half of the experts, and all else, the weights of those that a rank borrows."""
    batch = torch.zeros(4, 8, dtype=torch.long), torch.zeros(4, 8, dtype=torch.long)
    held = played_memory(
        lambda: copied(heads=2),
        mk.Plan(dp=2, ep=2),
        batch,
        mk.models.next_token_loss,
        torch.optim.SGD,
        steps=1,
    )
    own = sum(p.nbytes // (2 if ".experts." in name else 1) for name, p in copied(heads=2).named_parameters())
    each = 2 * 12 * 48 * 8  # bytes of an expert
    # In block 0 the second rank borrows expert 0; in block 1 the slots are 3 0 1 3 and 2 0 3 3.
    assert [held[rank]["params"] - own for rank in range(2)] == [each, 2 * each]


# ---- what is rejected --------------------------------------------------------------------------------------------


def test_what_cannot_be() -> None:
    how = {**HOW, "ranks": 4}
    model = place_experts(gpt(), {"block0.mlp.experts": [0, 0, 1, 0, 2, 3]})
    with pytest.raises(
        ValueError, match=r"4 ranks cannot have .* 6 slots .*balance\(8, gpus=4\)\.orders has 8"
    ):
        prepare(model, texts(4), mk.Plan(dp=4, ep=4), **how)
    model = copied()
    first, second = (model.get_submodule(f"block{i}.mlp") for i in range(2))
    second.experts.up = first.experts.up
    with pytest.raises(ValueError, match=r"share weights.*\{'block1.mlp.experts': \[0, 0, 1, 0, 2, 3\]\}\)"):
        prepare(model, texts(4), mk.Plan(dp=2, ep=2), **{**how, "ranks": 2})
    model = copied()
    model.get_submodule("block0.mlp.experts").up.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(ValueError, match=r"would not see the gradients of the copies.*Plan.serial\(\)"):
        prepare(model, texts(4), mk.Plan(dp=2, ep=2), **{**how, "ranks": 2})


# ---- faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", COPY_FAULTS)
def test_the_proof_finds_what_is_wrong_with_copies(clusters: Callable[[int], mk.Cluster], fault: str) -> None:
    how = {**HOW, "loss": PlantedInExperts(mk.models.next_token_loss, fault), "verify": "all"}
    run = clusters(2).train(copied(), texts(8, 8), mk.Plan(dp=2, ep=2), **how)
    with pytest.raises(mk.errors.NotSerial, match=r"step [12] is not that of serial training"):
        run.wait()
