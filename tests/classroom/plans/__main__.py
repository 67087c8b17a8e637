"""Mutants of the plan: which answers pass that reach the right numbers in another way than the exercise asks for?

    python -m tests.classroom.plans                         of every exercise
    python -m tests.classroom.plans zero-1 overlap          of these
    python -m tests.classroom.plans --kind serial --jobs 2

Prints each mutant that passes, and a table. Ends with status 1 if more than 2 % of those pass that are no right
answers, or if torch.distributed is refused where `ctx.comm` passes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from mpkit.course.catalogue import families, of_family
from tests.classroom.plans.mutants import PLAIN, Verdict, verdicts_of

MOST = 0.02

STATES = ("refused", "wrong", "not made", "the same", "equivalent", "passes")


def main() -> int:
    """Check the mutants, and print what passes."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.classroom.plans", description=__doc__.splitlines()[0]
    )
    parser.add_argument("names", nargs="*", help="exercises; all if none is named")
    parser.add_argument("--kind", action="append", default=[], help="mutants of this kind only")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes, each with ranks (default 2)")
    parser.add_argument("--verbose", action="store_true", help="print what refuses each mutant")
    asked = parser.parse_args()
    folders = [package.__name__.rsplit(".", 1)[1] for package in families()]
    names = asked.names or [entry.name for folder in folders for entry in of_family(folder)]
    found: list[Verdict] = []
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn")) as pool:
        for some in pool.map(verdicts_of, names, [frozenset(asked.kind)] * len(names)):
            found += some
            for each in some:
                if asked.verbose or (each.state == "passes") != (each.kind == PLAIN):
                    print(f"{each.exercise} [{each.kind}] {each.change}: {each.state} {each.why}", flush=True)
    return report(found)


def report(found: list[Verdict]) -> int:
    """Print the table; return 1 if too many pass."""
    counts = Counter((each.kind, each.state) for each in found)
    print(f"\n{'kind':14}" + "".join(f"{state:>12}" for state in STATES))
    for kind in dict.fromkeys(each.kind for each in found):
        print(f"{kind:14}" + "".join(f"{counts[kind, state]:12}" for state in STATES))
    others = [each for each in found if each.kind != PLAIN and each.state in ("refused", "wrong", "passes")]
    passing = sum(each.state == "passes" for each in others)
    right = [each for each in others if each.state != "wrong"]
    share = passing / len(right) if right else 0.0
    print(
        f"\n{len(others)} mutants that are no right answers; {len(right)} of them have right numbers, "
        f"and {passing} of these pass: {share:.1%}"
    )
    refused = [
        each.exercise for each in found if each.kind == PLAIN and each.state not in ("passes", "equivalent")
    ]
    print(f"torch.distributed is refused in {len(refused)} exercises: {', '.join(refused) or 'none'}")
    return int(share > MOST or bool(refused))


if __name__ == "__main__":
    sys.exit(main())
