"""One answer to one question: whatever says how long a step takes, and why, says the same.

exact       an estimate, its causes, its timeline; a simulation of its stage times; that timeline's critical path,
            causes of idle time; the same of a dry run, and of its trace replayed
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from mpkit.plan.schedule import NAMES
from mpkit.plan.schedule.summary import peak_live
from mpkit.prediction.cost_model.estimate import Estimate
from mpkit.timeline.idleness import CAUSES, idle_by_cause
from mpkit.timeline.timeline import Timeline
from tests.recipes import adamw

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
    forward, backward, beside, hop = step.played_times
    halves = [time / 2 for time in backward]
    simulated = mk.simulate(shape, forward, halves, halves, hop, beside=beside)
    assert simulated.step_time == pytest.approx(step.pipeline, rel=1e-9)
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
    if not step.blocking:
        messages = guess.because.get("messages between stages", 0.0)
        assert messages == pytest.approx(simulated.step_time - free.step_time, abs=1e-9 * simulated.step_time)


PLANS = [
    mk.Plan(pp=2, schedule="1f1b", microbatches=4, dp=2),
    mk.Plan(pp=2, schedule="zbv", microbatches=4, virtual_stages=2),
]


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_of_a_dry_run(clusters: Callable[[int], mk.Cluster], plan: mk.Plan, tmp_path: Path) -> None:
    tokens = torch.empty(16, 64, dtype=torch.long, device="meta")
    trace = mk.trace_fake(
        lambda: GPT(layers=4, width=128, heads=4, vocab=512, length=64), plan, batch=(tokens, tokens),
        loss=next_token_loss, optimizer=adamw, hardware="8x-a100-nvlink", cluster=clusters(1), steps=2,
    )  # fmt: skip
    timeline = mk.Timeline.of(trace)
    agrees(timeline)
    trace.save(tmp_path / "run.mpk")
    again = mk.Timeline.of(mk.Trace.load(tmp_path / "run.mpk"))
    assert again.step_time == timeline.step_time and again.peak_memory == timeline.peak_memory
