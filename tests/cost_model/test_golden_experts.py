"""Memory of Megatron's cases with experts, between steps and at the peak; what experts and routers keep."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.golden_experts import ExpertCase, read_expert_cases
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.memory import MemoryModel
from mpkit.prediction.cost_model.stack import stack_of

MOE = Architecture(2, 512, 8, experts=8, top_k=2)


@pytest.fixture(scope="module")
def cases() -> list[ExpertCase]:
    return [case for case in read_expert_cases() if not case.lacking]


@pytest.mark.parametrize(("apart", "recordings"), [(False, 66), (True, 53)])
def test_both_halves_are_within_7_percent_and_2_in_the_median(
    apart: bool, recordings: int, cases: list[ExpertCase]
) -> None:
    half = [case for case in cases if case.apart == apart]
    assert len(half) == recordings
    resident = [abs(case.errors[0]) for case in half]
    peak = [abs(case.errors[1]) for case in half if not case.resumed]
    assert median(resident) < 0.01 and max(resident) < 0.07
    assert median(peak) < 0.02 and max(peak) < 0.07


def test_every_case_is_predicted_or_says_what_is_lacking() -> None:
    every = read_expert_cases()
    assert len(every) == 151 and sum(bool(case.lacking) for case in every) == 32


def test_ranks_that_share_an_expert_keep_its_tokens_whole() -> None:
    """A token's copies take 2 x 512 bytes for each of 2 visits, on both ranks that share its experts."""
    stack = stack_of("megatron")
    divided, folded = (
        MemoryModel(MOE, 1024, stack).activations(
            0, Layout(tp=2, ep=2, dp=2, etp=etp, sequence_parallel=True)
        )
        for etp in (2, 1)
    )
    assert divided - folded == 1024 * 2 * 2 * 512 / 2
