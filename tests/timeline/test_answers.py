"""Every call that says how long a step takes, or what memory it needs, returns an Answer."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import mpkit as mk
from mpkit.data import text_batches
from mpkit.models import GPT, MLP, next_token_loss
from mpkit.plan.schedule import NAMES
from mpkit.plan.schedule.catalogue import peak_live
from mpkit.prediction.cost_model.estimate import Estimate
from mpkit.timeline.answer import PROFILED, Answer
from mpkit.timeline.comparison import Comparison
from mpkit.timeline.idleness import CAUSES, idle_by_cause
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Kind, Lane, lane_of
from tests.serial import Clusters, Train
from tests.timeline.test_timeline import timeline

PAGE = Path(__file__).parents[2] / "docs" / "which-call.md"
BIG = "llama3-8b", mk.Plan.zero(3, 8, precision="bf16"), "8x-h100-nvlink"
HOW = {"loss": torch.nn.functional.cross_entropy, "optimizer": torch.optim.SGD}
PLAN = mk.Plan.pipeline("1f1b", 2, 4)
DATA = [(torch.ones(8, 2), torch.zeros(8, dtype=torch.long))]


@pytest.fixture(scope="module")
def dry(clusters: Clusters) -> mk.Trace:
    return mk.trace_fake(lambda: MLP(2, 3), PLAN, batch=DATA[0], cluster=clusters(1), **HOW)


@pytest.fixture(scope="module")
def answers(train: Train, dry: mk.Trace) -> dict[str, Answer]:
    """An answer of each kind, by how the page's call begins."""
    torch.manual_seed(0)
    run = train(MLP(2, 3), DATA, PLAN, **HOW, steps=3)
    return {
        "run.timeline().step_time": run.timeline(),
        "run.timeline(hardware": run.timeline(hardware="8x-h100-nvlink"),
        "mk.estimate": mk.estimate(*BIG, global_batch=8, sequence=4096),
        "mk.fits": mk.fits(*BIG, sequence=4096),
        "mk.Timeline.of(mk.trace_fake": mk.Timeline.of(dry),
        "mk.advise": mk.advise("llama3-8b", "8x-h100-nvlink", global_batch=64, sequence=4096),
        "run.what_if": run.what_if(schedule="gpipe"),
        "mk.simulate": mk.simulate(mk.Plan.gpipe(4, 8)),
    }


def test_they_have_the_same_fields(answers: dict[str, Answer]) -> None:
    for name, found in answers.items():
        timeline = found.timeline()
        assert isinstance(found, Answer) and isinstance(timeline, Timeline), name
        assert timeline.step_time == pytest.approx(found.step_time, rel=1e-9), name
        assert found.bubble == timeline.bubble, name
        assert found.band is None or found.band[0] <= found.step_time <= found.band[1], name
        assert sum(found.because.values()) == pytest.approx(timeline.step_time, rel=1e-6), name
        assert [*found.because.values()] == sorted(found.because.values(), reverse=True), name
        assert all("total" not in held for held in found.memory), name
    assert len(mk.compare(*answers.values()).rows) == len(answers)


def test_memory_is_what_a_rank_holds_at_its_peak(answers: dict[str, Answer]) -> None:
    """Each category at its own peak may add up to more."""
    timeline = answers["run.timeline().step_time"].timeline()
    for held, peaks in zip(timeline.memory, timeline.peak_memory, strict=True):
        assert sum(held.values()) == peaks["total"] and all(held[name] <= peaks[name] for name in held)


def test_the_page_says_what_they_rest_on(answers: dict[str, Answer]) -> None:
    rows = re.findall(
        r"^\| [^|]+\? \| `([^`]+)` \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text("utf-8"), re.MULTILINE
    )
    wanted = {name: found.basis for name, found in answers.items()} | {"mk.profile": PROFILED}
    for name, basis in wanted.items():
        (said,) = [(measured, assumed) for call, measured, assumed in rows if call.startswith(name)]
        assert said == basis, name


def test_no_plan_no_answer() -> None:
    advice = mk.advise("llama3-70b", "2x-titan-rtx", global_batch=2, sequence=1024)
    with pytest.raises(ValueError, match=r"none of the \d+ plans considered fits 2x-titan-rtx"):
        _ = advice.step_time


# ---- One answer to one question: whatever says how long a step takes, and why, says the same.
# exact       an estimate, its causes, its timeline; a simulation of its stage times; that timeline's critical path,
#             causes of idle time; the same of a dry run, and of its trace replayed

TWO_STAGES = ("looped_bfs", "interleaved_1f1b", "interleaved_zb", "zbv", "dualpipev")
MACHINES = ("8x-a100-nvlink", "8x-rtx-4090", "4x8-h100-ndr", "8x-v100-nvlink")


def agrees(timeline: Timeline) -> None:
    """Check that all that can be asked of a timeline's last step adds up."""
    step = timeline.step(timeline.steps[-1])
    path, causes = step.critical_path(), idle_by_cause(step)
    same = {"rtol": 1e-9, "atol": 1e-12}
    np.testing.assert_allclose(path.step_time, step.step_time, **same)
    np.testing.assert_allclose(sum(op.seconds for op in path.ops), step.step_time, **same)
    np.testing.assert_allclose(causes.sum(axis=1), step.idle, **same)
    np.testing.assert_allclose(np.add(step.busy, step.idle), step.step_time, **same)
    np.testing.assert_allclose(1 - sum(step.busy) / step.world_size / step.step_time, step.bubble, **same)
    assert (causes >= -1e-12).all()


@st.composite
def estimates(draw: st.DrawFn) -> Estimate:
    """Draw a model, a plan and a machine, and estimate the step."""
    machine = mk.hardware(draw(st.sampled_from(MACHINES)))
    pp, tp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4]))
    assume(pp * tp <= machine.devices)
    dp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if pp * tp * n <= machine.devices]))
    schedule = draw(st.sampled_from(NAMES)) if pp > 1 else "1f1b"
    heads = draw(st.sampled_from([8, 16]))
    model = {
        "layers": draw(st.integers(2 * pp, 4 * pp)), "hidden": 64 * heads, "heads": heads, "vocabulary": 32_000,
    }  # fmt: skip
    plan = mk.Plan(
        pp=pp, tp=tp, dp=dp, schedule=schedule, virtual_stages=2 if schedule in TWO_STAGES else 1,
        microbatches=2 * pp * draw(st.integers(1, 4)), precision=draw(st.sampled_from(["full", machine.device.half])),
        zero=draw(st.sampled_from([0, 1])) if dp > 1 else 0,
        recompute=draw(st.sampled_from(["none", "full"])),
    )  # fmt: skip
    batch = plan.dp * plan.microbatches * draw(st.sampled_from([1, 2]))
    return mk.estimate(model, plan, machine, global_batch=batch, sequence=draw(st.sampled_from([128, 1024])))


@settings(max_examples=8, deadline=None)
@given(estimates())
def test_an_estimate_its_timeline_and_a_simulation_of_its_times_agree(guess: Estimate) -> None:
    step, timeline = guess.step, guess.timeline()
    assert timeline.step_time == pytest.approx(guess.step_time, rel=1e-9)
    assert sum(guess.because.values()) == pytest.approx(guess.step_time, rel=1e-9)
    shape = replace(guess.plan, tp=1, dp=1, zero=0, recompute="none")
    forward, backward, beside, hop = step.played[4:]
    halves = [time / 2 for time in backward]
    simulated = mk.simulate(shape, forward, halves, halves, hop, beside=beside)
    assert simulated.step_time == pytest.approx(step.seconds - sum(step.after.values()), rel=1e-9)
    live = [peak["activations"] for peak in simulated.peak_memory]
    on = shape.build().stage_to_rank
    of_rank = peak_live(shape.schedule, shape.pp, shape.microbatches, shape.virtual_stages)
    assert live == [held * on.count(rank) for rank, held in enumerate(of_rank)]
    agrees(simulated)
    agrees(timeline)
    # What communication costs is the same, whoever is asked.
    free = mk.simulate(shape, forward, halves, halves, beside=beside)
    causes = idle_by_cause(simulated)
    alike = causes[:, CAUSES.index("imbalance")] == 0
    saved = causes[alike, CAUSES.index("communication")]
    np.testing.assert_allclose(saved, simulated.step_time - free.step_time, atol=1e-9 * simulated.step_time)
    if step.played._replace(hop=0.0) == step.free:  # where sends do not block
        messages = guess.because.get("messages between stages", 0.0)
        assert messages == pytest.approx(simulated.step_time - free.step_time, abs=1e-9 * simulated.step_time)


# ---- Idle time by cause, and timelines beside each other.

IMBALANCE, COMMUNICATION = CAUSES.index("imbalance"), CAUSES.index("communication")
TIMES = st.sampled_from([0.5, 1.0, 1.37, 2.0])


def plan_of(name: str, p: int = 4, m: int = 8) -> mk.Plan:
    virtual = name in ("looped_bfs", "interleaved_1f1b", "interleaved_zb", "zbv", "dualpipev")
    return mk.Plan(pp=p, schedule=name, microbatches=m, virtual_stages=2 if virtual else 1)


@settings(max_examples=25)
@given(st.sampled_from(NAMES), st.integers(2, 4), st.data(), st.sampled_from([0.0, 0.1, 0.37]))
def test_imbalance_is_what_a_balanced_cut_would_save(
    name: str, p: int, data: st.DataObject, hop: float
) -> None:
    plan = plan_of(name, p, 2 * p)
    times = [data.draw(st.lists(TIMES, min_size=plan.stages, max_size=plan.stages)) for _ in range(3)]
    slow, even = mk.simulate(plan, *times, hop=hop), mk.simulate(plan, *map(np.mean, times), hop=hop)
    saved = np.array(slow.idle) - np.array(even.idle)  # less than nothing on a rank that the others wait for
    np.testing.assert_allclose(idle_by_cause(slow)[:, IMBALANCE], np.maximum(saved, 0), atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_communication_is_what_links_without_latency_would_save(name: str) -> None:
    plan = plan_of(name)
    forward = [1.0, 2.0] * (plan.stages // 2)
    slow, fast = (mk.simulate(plan, forward=forward, hop=hop) for hop in (3.0, 0.0))
    of_slow, of_fast = idle_by_cause(slow), idle_by_cause(fast)
    for rank in range(4):
        if of_slow[rank, IMBALANCE] == of_fast[rank, IMBALANCE] == 0:
            assert of_slow[rank, COMMUNICATION] == pytest.approx(slow.step_time - fast.step_time)
    rest = [causes.sum() - causes[:, [IMBALANCE, COMMUNICATION]].sum() for causes in (of_slow, of_fast)]
    assert rest[0] == pytest.approx(rest[1])


SPANS = [
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.sampled_from([Kind.FORWARD, Kind.BACKWARD, Kind.WAIT, Kind.ALL_REDUCE, beside]),
            st.integers(0, 9), st.integers(1, 6),
        ),
        min_size=1, max_size=12,
    )
    for beside in (Kind.DATA, Kind.COPY_TO_HOST)
]  # fmt: skip


@pytest.mark.parametrize("clock", ["virtual", "measured"])
@given(spans=st.one_of(SPANS))
def test_whatever_overlaps_they_add_up(spans: list[tuple[int, Kind, int, int]], clock: str) -> None:
    rows, until = [], {0: 0, 1: 0}
    for rank, kind, pause, length in spans:
        start = pause
        if (
            lane_of(kind) == Lane.COMPUTE
        ):  # a rank computes one thing at a time; whatever else overlaps with it
            start, until[rank] = until[rank] + pause // 4, until[rank] + pause // 4 + length
        rows.append((rank, kind, float(start), float(start + length)))
    t = timeline(*rows, clock=clock)
    found = idle_by_cause(t)
    np.testing.assert_allclose(found.sum(axis=1), t.idle, atol=1e-9)
    assert (found >= -1e-9).all()


@pytest.fixture(scope="module")
def against_prediction(cluster: mk.Cluster) -> Comparison:
    torch.manual_seed(0)
    model, data = GPT(layers=4, width=32, length=16), text_batches(batch=8, length=16, steps=2)
    run = cluster.train(
        model, data, mk.Plan.gpipe(4, 4), loss=next_token_loss, optimizer=torch.optim.AdamW, steps=2,
        show=False,
    ).wait()  # fmt: skip
    return mk.compare(run)


def test_a_run_is_compared_with_its_prediction(against_prediction: Comparison) -> None:
    assert [row.name for row in against_prediction.rows] == ["predicted", "measured"]
    predicted, measured = (row.timeline for row in against_prediction.rows)
    assert (predicted.clock, measured.clock) == ("simulated", "virtual")
    gap = against_prediction.gap()
    assert sum(gap.values()) == pytest.approx(measured.step_time - predicted.step_time)
    # The means are the run's own, so forwards and backwards are no part of the gap; the optimizer is all of it.
    assert all(abs(gap[f"{kind} of stage {s}"]) < 1e-9 for kind in ("forward", "backward") for s in range(4))
    assert gap["optimizer"] > 0
    assert "measured is" in str(against_prediction)


@pytest.mark.parametrize(("a", "b"), [("gpipe", "zb_h1"), ("zb_h1", "zbv"), ("naive", "1f1b")])
def test_a_gap_is_explained_to_its_end(a: str, b: str) -> None:
    times = {"forward": 1.0, "input_grad": 1.1, "weight_grad": 0.9, "hop": 0.2}
    found = mk.compare(first=mk.simulate(plan_of(a), **times), second=mk.simulate(plan_of(b), **times))
    first, second = (row.timeline for row in found.rows)
    assert sum(found.gap().values()) == pytest.approx(second.step_time - first.step_time)
    assert sum(found.gap("second", "first").values()) == pytest.approx(first.step_time - second.step_time)
