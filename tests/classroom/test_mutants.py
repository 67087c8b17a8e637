"""The faulty solutions by which the exercises' checks are tested."""

from __future__ import annotations

import ast

import pytest

from mpkit.course.catalogue import families, find, of_family
from tests.classroom.mutants.checking import checked, equivalent
from tests.classroom.mutants.mutate import chosen, mutants

NAMES = [entry.name for package in families() for entry in of_family(package.__name__.rsplit(".", 1)[1])]


def test_mutants_are_different_programs() -> None:
    source = find("pass-the-token").source
    codes = [mutant.code for mutant in mutants(source)]
    assert len(codes) >= 40
    assert len(set(codes)) == len(codes)
    assert ast.unparse(ast.parse(source.plain)) + "\n" not in codes


def test_the_same_seed_draws_the_same() -> None:
    source = find("buckets").source
    assert chosen(source, 10, "a") == chosen(source, 10, "a") != chosen(source, 10, "b")


def test_what_is_recorded_as_equivalent_is_a_mutant() -> None:
    for name, recorded in equivalent().items():
        assert set(recorded) <= {mutant.change for mutant in mutants(find(name).source)}, name


@pytest.mark.soak
@pytest.mark.parametrize("quarter", range(4))
@pytest.mark.parametrize("name", NAMES)
def test_mutants_are_caught(name: str, quarter: int) -> None:
    """Those of `make test-mutants`, ten at a time: the gate draws some of these tests."""
    some = chosen(find(name).source, 40, "")[10 * quarter : 10 * quarter + 10]
    verdicts = [checked(name, mutant) for mutant in some]
    assert not [verdict.mutant.change for verdict in verdicts if not verdict.by and not verdict.why]
