"""How busy experts are, in estimates: the rows and the memory of the busiest rank are those of a run."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

import mpkit as mk
from mpkit.cli import main
from mpkit.prediction.advice.search import kinds_of

MACHINE, MIXTRAL = "8x-h100-nvlink", "mixtral-8x7b"
ASKED: dict[str, Any] = {"global_batch": 64, "sequence": 4096}
PLAN = mk.Plan(dp=8, ep=8, zero=1, microbatches=8, precision="bf16")


def test_products_and_messages_of_experts_grow_with_the_busiest_rank() -> None:
    model = {
        "layers": 4,
        "hidden": 1024,
        "heads": 8,
        "experts": 8,
        "top_k": 2,
        "vocabulary": 1000,
        "ffn": 4096,
    }
    found = [
        mk.estimate(model, PLAN, MACHINE, expert_load=load, **ASKED).because for load in (None, 1.0, 2.0, 3.0)
    ]
    assert found[0] == found[1]
    for cause in ("products", "experts", "elementwise"):
        took = [each[cause] for each in found[1:]]
        assert took[2] - took[1] == pytest.approx(took[1] - took[0], rel=0.05) and took[1] > took[0]
    assert found[3]["attention"] == found[1]["attention"]


@pytest.mark.parametrize("stack", ["pytorch", "megatron", "torchtitan"])
def test_the_busier_the_slower_and_the_fuller(stack: str) -> None:
    """Wherever experts are divided, with tensor parallelism or without; not where each rank has all."""
    for tp, ep, etp in ((1, 8, None), (2, 4, 2), (2, 8, 1), (2, 4, None)):
        plan = mk.Plan(dp=8 // tp, tp=tp, ep=ep, etp=etp, precision="bf16", sequence_parallel=tp > 1)
        found = [
            mk.estimate(MIXTRAL, plan, MACHINE, expert_load=load, stack=stack, **ASKED)
            for load in (None, 1.5, 3)
        ]
        for less, more in pairwise(found):
            assert less.step_time < more.step_time and less.peak_memory < more.peak_memory
    whole = mk.Plan(dp=8, precision="bf16")
    times = {mk.estimate(MIXTRAL, whole, MACHINE, expert_load=load, **ASKED).step_time for load in (None, 3)}
    assert len(times) == 1


def test_advice_about_busy_experts_divides_them_less() -> None:
    """The time that a plan loses to its busiest rank counts, and each ep has its own."""
    asked: dict[str, Any] = {"global_batch": 256, "sequence": 4096}
    even, uneven = (mk.advise(MIXTRAL, "2x8-h100-ndr", expert_load=each, **asked) for each in (None, 4.0))
    assert even.best is not None and uneven.best is not None and even.best.ep > uneven.best.ep
    assert "experts: uniform routing." in str(even) and "experts: uneven routing" in str(uneven)
    for plan, found in zip(uneven.plans, kinds_of(uneven.found), strict=False):
        assert uneven.estimate(plan).step_time == pytest.approx(found.seconds, rel=1e-9)
    cost = uneven.estimate(even.best)
    assert cost.step_time > 1.3 * even.estimate(even.best).step_time and cost.layout.busiest == 4.0


def test_what_was_assumed_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words = {
        load: str(mk.estimate(MIXTRAL, PLAN, MACHINE, expert_load=load, **ASKED)) for load in (None, 1.5)
    }
    assert "experts     uniform routing" in words[None]
    assert "experts     the busiest of ep=8 ranks has 1.50 times the mean rows" in words[1.5]
    found = mk.fits(MIXTRAL, PLAN, MACHINE, expert_load=1.5, **ASKED)
    assert found.remedy is not None and found.remedy.estimate.layout.busiest == 1.5
    assert "experts  " not in str(mk.estimate("llama3-8b", mk.Plan(dp=8), MACHINE, **ASKED))
    main(
        [
            "estimate",
            "--model",
            MIXTRAL,
            "--plan",
            "zero1+ep8+bf16",
            "--hardware",
            MACHINE,
            "--expert-load",
            "2",
        ]
    )
    assert "2.00 times the mean rows" in capsys.readouterr().out


@pytest.mark.parametrize("load", [0.5, float("nan"), "busy", [1.0, 2.0]])
def test_a_load_that_cannot_be_is_rejected(load: Any) -> None:
    with pytest.raises(ValueError, match=r"1 or more, such as expert_load=1\.4"):
        mk.estimate(MIXTRAL, PLAN, MACHINE, expert_load=load, **ASKED)
    with pytest.raises(ValueError, match=r"1 or more, such as expert_load=1\.4"):
        mk.advise(MIXTRAL, MACHINE, expert_load=load, **ASKED)
    with pytest.raises(ValueError, match="that is 8 times the mean; expert_load=8"):
        mk.estimate(MIXTRAL, PLAN, MACHINE, expert_load=9, **ASKED)
    with pytest.raises(ValueError, match="this model has none"):
        mk.advise("llama3-8b", MACHINE, expert_load=2, **ASKED)
