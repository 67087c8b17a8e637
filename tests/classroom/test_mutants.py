"""The faulty solutions by which the exercises' checks are tested."""

from __future__ import annotations

import ast

from mpkit.classroom.catalogue import find
from tests.classroom.mutants.checking import equivalent
from tests.classroom.mutants.mutate import chosen, mutants


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
