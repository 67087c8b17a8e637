"""Every call that says how long a step takes, or what memory it needs, returns an Answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mpkit as mk
from mpkit.launch.session.run import Run
from mpkit.models import MLP
from mpkit.timeline.answer import PROFILED, Answer
from mpkit.timeline.timeline import Timeline

PAGE = Path(__file__).parents[2] / "docs" / "which-call.md"
BIG = "llama3-8b", mk.Plan.zero(3, 8, precision="bf16"), "8x-h100-nvlink"
HOW = {"loss": torch.nn.functional.cross_entropy, "optimizer": torch.optim.SGD}
PLAN = mk.Plan.pipeline("1f1b", 2, 4)
DATA = [(torch.ones(8, 2), torch.zeros(8, dtype=torch.long))]


@pytest.fixture(scope="module")
def dry() -> mk.Trace:
    return mk.trace_fake(lambda: MLP(2, 3), PLAN, batch=DATA[0], **HOW)


@pytest.fixture(scope="module")
def answers(train: Callable[..., Run], dry: mk.Trace) -> dict[str, Answer]:
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
