"""How busy experts are, in estimates: the rows and the memory of the busiest rank are those of a run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import mpkit as mk
from mpkit.cli import main
from mpkit.models import GPT, next_token_loss
from mpkit.prediction.workload.routed_load import routed_load, rows_of_ranks
from tests.recipes import adamw

MACHINE, MIXTRAL = "8x-h100-nvlink", "mixtral-8x7b"
ASKED: dict[str, Any] = {"global_batch": 64, "sequence": 4096}
PLAN = mk.Plan(dp=8, ep=8, zero=1, microbatches=8, precision="bf16")


def gpt() -> torch.nn.Module:
    torch.manual_seed(0)
    return GPT(layers=2, width=64, heads=4, vocab=64, length=64, experts=8, top_k=2)


def test_the_busiest_rank_of_a_run_is_that_of_its_estimate(clusters: Callable[[int], mk.Cluster]) -> None:
    """Rows are exact. Activations of a run grow with the rows of a rank as the formula's do."""
    model, plan = gpt(), mk.Plan(dp=4, ep=4)
    tokens = torch.randint(64, (16, 64), generator=torch.Generator().manual_seed(1))
    run = clusters(4).train(model, [(tokens, tokens)], plan, loss=next_token_loss, optimizer=adamw, steps=1)
    load, held = run.wait().expert_load, [each["activations"] for each in run.timeline().peak_memory]
    rows = np.stack([each[-1].sum(0).reshape(4, 2).sum(1) for each in load.sent.values()])  # [layers, ranks]
    asked: dict[str, Any] = {"global_batch": 16, "sequence": 64, "stack": "mpkit"}
    even, uneven = (mk.estimate(model, plan, "cpu", expert_load=each, **asked) for each in (None, load))
    assert uneven.layout.busiest == rows.max(1).sum() / rows.mean(1).sum() > 1.1
    total = rows.sum(0)
    assert rows[:, total.argmax()].tolist() == rows.max(1).tolist(), "one rank is the busiest in both layers"
    more = [each.stage_memory[0]["activations"] for each in (even, uneven)]
    by_row = (more[1] - more[0]) / (total.max() - total.mean())
    assert by_row == pytest.approx(np.polyfit(total, held, 1)[0], rel=0.03)
    assert more[1] == pytest.approx(max(held), rel=0.03) and more[0] < 0.91 * max(held)
    placed = load.balance(8, gpus=4)
    better = mk.estimate(model, plan, "cpu", expert_load=placed, **asked)
    after = sum(layer.load_after.max() for layer in placed.layers)
    assert better.layout.busiest == pytest.approx(after / rows.mean(1).sum())
    assert even.step_time < better.step_time < uneven.step_time


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
        mk.estimate(model, PLAN, MACHINE, expert_load=load, stack="mpkit", **ASKED).because
        for load in (None, 1.0, 2.0, 3.0)
    ]
    assert found[0] == found[1]
    for cause in ("products", "experts", "elementwise"):
        took = [each[cause] for each in found[1:]]
        assert took[2] - took[1] == pytest.approx(took[1] - took[0], rel=0.05) and took[1] > took[0]
    assert found[3]["attention"] == found[1]["attention"]


@pytest.mark.parametrize("stack", ["pytorch", "mpkit", "megatron", "torchtitan"])
def test_the_busier_the_slower_and_the_fuller(stack: str) -> None:
    """Wherever experts are divided, with tensor parallelism or without; not where each rank has all."""
    for tp, ep, etp in ((1, 8, None), (2, 4, 2), (2, 8, 1), (2, 4, None)):
        plan = mk.Plan(dp=8 // tp, tp=tp, ep=ep, etp=etp, precision="bf16", sequence_parallel=tp > 1)
        found = [
            mk.estimate(
                MIXTRAL, plan, MACHINE, expert_load=load, stack=stack if stack != "mpkit" else None, **ASKED
            )
            for load in (None, 1.5, 3)
        ]
        for less, more in pairwise(found):
            assert less.step_time < more.step_time and less.peak_memory < more.peak_memory
    whole = mk.Plan(dp=8, precision="bf16")
    times = {mk.estimate(MIXTRAL, whole, MACHINE, expert_load=load, **ASKED).step_time for load in (None, 3)}
    assert len(times) == 1


def test_rows_of_experts_are_those_of_their_ranks() -> None:
    rows = [6.0, 2.0, 1.0, 1.0]
    load = routed_load([rows, [1, 1, 1, 7]])
    assert load is not None and [load.imbalance(ep) for ep in (1, 2, 4)] == [1.0, 16 / 10, 13 / 5]
    assert rows_of_ranks(rows, [0, 0, 0, 1, 2, 3], 2).tolist() == [6.0, 4.0]
    assert routed_load(None) is None and routed_load(load) is load


def test_advice_about_busy_experts_divides_them_less() -> None:
    """The time that a plan loses to its busiest rank counts, and each ep has its own."""
    asked: dict[str, Any] = {"global_batch": 256, "sequence": 4096}
    even, uneven = (mk.advise(MIXTRAL, "2x8-h100-ndr", expert_load=each, **asked) for each in (None, 4.0))
    assert even.best is not None and uneven.best is not None and even.best.ep > uneven.best.ep
    assert "experts: uniform routing." in str(even) and "(given)" in str(uneven)
    for plan, found in zip(uneven.plans, uneven.found, strict=False):
        assert uneven.estimate(plan).step_time == pytest.approx(found.seconds, rel=1e-9)
    cost = uneven.estimate(even.best)
    assert cost.step_time > 1.3 * even.estimate(even.best).step_time and cost.layout.busiest == 4.0


def test_what_was_assumed_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words = {
        load: str(mk.estimate(MIXTRAL, PLAN, MACHINE, expert_load=load, **ASKED)) for load in (None, 1.5)
    }
    assert "experts     uniform routing" in words[None]
    assert "experts     the busiest of ep=8 ranks has 1.50 times the mean rows (given)" in words[1.5]
    found = mk.fits(MIXTRAL, PLAN, MACHINE, expert_load=1.5, **ASKED)
    assert "Assumed of experts: the busiest of ep=8" in str(found)
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


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (0.5, "has 1 or more times the mean.*expert_load=1.4; rows of experts"),
        (float("nan"), "1 or more times the mean"),
        ("busy", "expert_load='busy' is no load"),
        ([1.0, -1.0], "is no load"),
        ([1.0] * 4, r"the rows of 4 experts per layer \(given\), and the model has 8: .*expert_load="),
        ([0.0] * 8, "a layer without rows"),
        (9, "if one of ep=8 ranks has all rows, that is 8 times the mean; expert_load=8"),
    ],
)
def test_a_load_that_cannot_be_is_rejected(load: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mk.estimate(MIXTRAL, PLAN, MACHINE, expert_load=load, **ASKED)
    if load != 9:  # in advice, a ratio is that of the groups that can have it
        with pytest.raises(ValueError, match=words):
            mk.advise(MIXTRAL, MACHINE, expert_load=load, **ASKED)
    with pytest.raises(ValueError, match="this model has none"):
        mk.advise("llama3-8b", MACHINE, expert_load=2, **ASKED)
