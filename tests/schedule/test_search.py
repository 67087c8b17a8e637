"""A search over schedules: never worse than what has a name, within the cap, the same for the same seed."""

import math
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import mpkit as mk
from mpkit.plan.schedule import NAMES, Schedule, validate
from mpkit.plan.schedule.catalogue import SCHEDULES
from mpkit.plan.schedule.greedy import ActionCosts, Policy, greedy, span
from tests.serial import Clusters

UNEVEN: dict[str, Any] = {
    "forward": [1, 1.2, 0.8, 1.5], "input_grad": [0.9, 1.3, 0.8, 1.6], "weight_grad": [0.7, 0.8, 0.9, 0.8],
}  # fmt: skip


def test_it_finds_zb_h1s_length_by_itself() -> None:
    """Of equal stages under 1F1B's memory, 27: that no order is shorter, the bound says."""
    costs = ActionCosts([1] * 4, [1] * 4, [1] * 4, 0, [4] * 4)
    rows = greedy(range(4), 8, costs, Policy("deep", "turns", range(4), 0, [4] * 4))
    schedule = Schedule(rows).validate(max_live=4)
    assert span(schedule, {"F": costs.f, "I": costs.i, "W": costs.w}, 0) == 27
    found = mk.search_schedule(mk.Plan.gpipe(4, 8), max_live=4)
    assert (found.seconds, found.at_least, found.improvement) == (27, 27, 0)
    assert found.plan == mk.Plan.pipeline("zb_h1", 4, 8), "where nothing is shorter, what has a name"


def test_it_improves_on_every_named_schedule_of_uneven_stages() -> None:
    plan = mk.Plan.pipeline("zbv", 4, 8)
    times = {name: [*each, *each[::-1]] for name, each in UNEVEN.items()}
    found = mk.search_schedule(plan, **times, hop=0.3, max_live=9, effort=50_000)
    assert found.improvement > 0.005
    assert found.plan.schedule.name == "searched"
    for name in ("zbv", "interleaved_zb"):
        other = mk.Plan.pipeline(name, 4, 8, virtual_stages=2)
        assert mk.simulate(other, **times, hop=0.3).step_time == pytest.approx(found.named[name])
        assert found.named[name] > found.seconds


def random_case(random: Random) -> tuple[mk.Plan, dict[str, Any], float | None]:
    name = random.choice(NAMES)
    p, m = random.randint(1, 4), random.randint(1, 7)
    v = SCHEDULES[name].stages_per_rank(random.randint(1, 3))
    plan = mk.Plan(pp=p, schedule=name, microbatches=m, virtual_stages=v)
    times: dict[str, Any] = {
        kind: [random.choice((0.5, 1, 1.5, 2)) for _ in range(plan.stages)]
        for kind in ("forward", "input_grad", "weight_grad")
    }
    times["hop"] = random.choice((0, 0.25, 1))
    return plan, times, random.choice((None, v, v + 1, p * v))


def test_random_cases() -> None:
    """Valid, within the cap, no longer than a named schedule that fits, no shorter than can be."""
    for seed in range(12):
        plan, times, cap = random_case(Random(seed))
        found = mk.search_schedule(plan, **times, max_live=cap, effort=5_000, seed=seed)
        schedule = found.plan.build()
        validate(schedule, max_live=math.inf if cap is None else cap)
        assert (schedule.ranks, schedule.microbatches) == (plan.pp, plan.microbatches)
        assert found.timeline.step_time == pytest.approx(found.seconds)
        assert found.seconds >= found.at_least - 1e-9
        v = plan.virtual_stages
        for name in NAMES:
            if SCHEDULES[name].can_have(v):
                other = mk.Plan(pp=plan.pp, schedule=name, microbatches=plan.microbatches, virtual_stages=v)
                peak = max(other.build().peak_live)
                if cap is None or peak <= cap:
                    assert found.seconds <= mk.simulate(other, **times).step_time + 1e-9
                    assert name in found.named
                else:
                    assert found.too_large[name] == peak


def test_the_same_seed_finds_the_same() -> None:
    plan, how = mk.Plan.pipeline("zbv", 3, 4), {"hop": 0.3, "max_live": 4, "seed": 3, "effort": 10_000}
    one, *others = (mk.search_schedule(plan, **how) for _ in range(3))  # other seeds, others
    assert all((each.plan, each.seconds) == (one.plan, one.seconds) for each in others)


@pytest.mark.parametrize(("plan", "options", "words"), [
    ("gpipe", {}, r"search_schedule\('gpipe'\).*Plan.pipeline"),
    (mk.Plan.ddp(2), {}, "the order of a pipeline's actions is searched"),
    (mk.Plan.pipeline("zbv", 2, 4), {"max_live": 1}, r"rank 0 has 2 of the stages.*takes max_live=2 at least"),
    (mk.Plan.gpipe(2, 4), {"max_live": [1, 2, 3]}, "2 of them, one per rank"),
    (mk.Plan.gpipe(2, 4), {"forward": [1]}, "1 times for 2 stages"),
    (mk.Plan.gpipe(2, 4), {"hop": -1}, "not negative"),
])  # fmt: skip
def test_what_cannot_be_searched(plan: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mk.search_schedule(plan, **options)


@pytest.mark.slow
def test_with_the_times_of_a_run_and_then_run(clusters: Clusters) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    data = [(torch.randn(8, 32), torch.randn(8, 32))]
    options = {
        "loss": nn.functional.mse_loss, "optimizer": lambda ps: torch.optim.SGD(ps, lr=0.1), "steps": 3,
    }  # fmt: skip
    whole = clusters(2).train(model, data, mk.Plan.gpipe(2, 4), **options).wait()
    times = whole.timeline().stage_times()
    assert len(times["forward"]) == 2 and min(times["forward"]) > 0
    assert times["input_grad"] == times["weight_grad"], "a backward that is not split is half and half"
    assert times["hop"] > 0
    found = mk.search_schedule(mk.Plan.gpipe(2, 4), **times, effort=5_000)
    run = clusters(2).train(model, data, found.plan, **options).wait()
    assert run.losses == pytest.approx(whole.losses)
    split = run.timeline().stage_times()
    assert min(split["input_grad"]) > 0 and min(split["weight_grad"]) > 0
