"""Mutation testing of the checks: which faulty solutions pass?

    python -m tests.classroom.mutants                       at most 40 mutants of every exercise
    python -m tests.classroom.mutants buckets overlap       of these
    python -m tests.classroom.mutants --family zero --most 100

Prints each mutant that passes, with whether it is recorded as equivalent (`equivalent.toml`), and a table. Ends with
status 1 if less than 95 % of the others are caught.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from mpkit.course.catalogue import ExerciseEntry, families, find, of_family
from tests.classroom.mutants.checking import tried

GOAL = 0.95


def main() -> int:
    """Try the mutants, and print what passes."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.classroom.mutants", description=__doc__.splitlines()[0]
    )
    parser.add_argument("names", nargs="*", help="exercises; all if none is named")
    parser.add_argument(
        "--family", action="append", default=[], help="all exercises of a family, such as zero"
    )
    parser.add_argument("--most", type=int, default=40, help="mutants per exercise (default 40)")
    parser.add_argument("--seed", default="", help="which mutants are drawn")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes, each with ranks (default 2)")
    asked = parser.parse_args()
    entries = list(_entries(asked.names, asked.family))
    tries, passed, known, told = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for verdict in tried(entries, asked.most, asked.seed, asked.jobs):
        name, change = verdict.exercise, verdict.mutant.change
        tries[name] += 1
        told[verdict.told] += bool(verdict.by)
        if not verdict.by:
            (known if verdict.why else passed)[name] += 1
            how = f"equivalent: {verdict.why}" if verdict.why else "PASSES"
            print(f"{name} [{verdict.mutant.operator}]  {change}\n    {how}", flush=True)
    print(f"\n{'exercise':28} {'mutants':>8} {'caught':>8} {'equivalent':>11} {'pass':>6}")
    for name in tries:
        caught = tries[name] - passed[name] - known[name]
        print(f"{name:28} {tries[name]:8} {caught:8} {known[name]:11} {passed[name]:6}")
    total, missed = tries.total() - known.total(), passed.total()
    share = 1 - missed / total if total else 1.0
    print(
        f"{'all':28} {tries.total():8} {total - missed:8} {known.total():11} {missed:6}   {share:.1%} caught"
    )
    unlisted = told.total() - told["listed"]
    words = ", ".join(
        f"{told[kind]} {kind or 'general hint'}" for kind in ("listed", "relation", "line", "wait", "")
    )
    print(f"what is told of those that are caught: {words}")
    true_of_it = 1 - told[""] / unlisted if unlisted else 1.0
    print(f"of those that no list has {true_of_it:.1%} are told something that is true of them")
    return 0 if share >= GOAL else 1


def _entries(names: list[str], folders: list[str]) -> list[ExerciseEntry]:
    everything = [package.__name__.rsplit(".", 1)[1] for package in families()]
    chosen = [entry for family in folders or ([] if names else everything) for entry in of_family(family)]
    return [find(name) for name in names] + chosen


if __name__ == "__main__":
    sys.exit(main())
