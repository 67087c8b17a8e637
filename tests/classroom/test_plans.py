"""Answers with another plan than the exercise asks for: the tool that makes them, and what checks say of them."""

from __future__ import annotations

import pytest

from mpkit.course.catalogue import families, find, of_family
from tests.classroom.plans.mutants import PLAIN, plan_mutants, recorded, verdicts_of

NAMES = [entry.name for package in families() for entry in of_family(package.__name__.rsplit(".", 1)[1])]


def test_plans_around_data_parallel_training() -> None:
    """Each kind on one exercise, whose reference sends one all-reduce per parameter."""
    found = {f"{each.kind} {each.change}": each for each in verdicts_of("split-and-average", frozenset())}
    states = {name: each.state for name, each in found.items()}
    assert states["serial on every rank"] == "refused" and "work" in found["serial on every rank"].why
    assert states["one rank on rank 0"] == "wrong", "samples that no rank's model has seen"
    assert states["messages in eight pieces"] == states["messages four times"] == "refused"
    assert states["copies changes copies"] == "wrong"
    assert states["constant ctx.world_size → 2"] == "wrong"
    assert states[f"{PLAIN} "] == "passes"


def test_a_plan_with_a_backward_after_the_answer() -> None:
    """The result of a layer is given its gradient by the exercise: all ranks go backward together, too."""
    found = verdicts_of("row-parallel", frozenset(("serial", "one rank")))
    assert [each.state for each in found] == ["refused", "refused"]
    assert all("bytes" in each.why for each in found), "the numbers are right"


def test_schedules_of_another_name_are_refused() -> None:
    found = {each.change: each for each in verdicts_of("gpipe", frozenset(("schedule",)))}
    assert found["gpipe"].state in ("passes", "equivalent")
    assert found["1f1b"].state == "refused", "it has the same bubble"


def test_what_is_recorded_as_a_right_plan_is_a_mutant() -> None:
    for name, changes in recorded().items():
        made = {f"{each.kind}: {each.change}" for each in plan_mutants(find(name))}
        assert set(changes) <= made, name


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_plans_are_told_from_the_reference(name: str) -> None:
    """Those of `make course-mutants`, by exercise: the gate draws some of these tests."""
    found = verdicts_of(name, frozenset())
    assert not [
        f"{each.kind}: {each.change}" for each in found if (each.state == "passes") != (each.kind == PLAIN)
    ]
