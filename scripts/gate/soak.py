"""`make soak`: every test, other systems, the zoo, other releases of torch; `--slice 2/6` for a part; a table."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from scripts.gate.__main__ import CLASSROOM, ROOT, TWO
from scripts.gate.report import Report
from scripts.gate.steps import run

HOURS = 4.0
"""The limit of the whole soak."""

MODULES = ("tests.systems", "tests.systems.accepted", "tests.zoo", "scripts.gate.torch_versions")
"""Programs of other systems, their configurations, the zoo, and the core of the tests on other releases of torch."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak, print its table, and return the exit status."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--slice", default="1/1", metavar="K/N", help="the K-th of N parts")
    options, others = parser.parse_known_args(arguments)
    part, parts = map(int, options.slice.split("/"))
    out = Path(tempfile.mkdtemp(prefix="mpkit-soak-"))
    environment = {"MPKIT_TEST_LIMITS": "2", **os.environ}
    until, report = time.monotonic() + 3600 * HOURS, Report(out)
    everything = [
        ("tests", "not alone", TWO),
        ("classroom", "not alone", (*TWO, *CLASSROOM)),
        ("alone", "alone", ()),
        ("classroom-alone", "alone", CLASSROOM),
        ("browser", "soak or not soak", ("tests/browser",)),
    ]
    if not os.environ.get("CHROMIUM"):
        report.not_run.append("browser: there is no Chromium")
        everything.pop()

    def step(name: str, *command: str) -> None:
        ended = run(
            name, [sys.executable, "-m", *command], until, root=ROOT, out=out, environment=environment
        )
        report.steps.append(ended)

    for name, marks, how in everything:
        chosen = ("-p", "scripts.gate.plugin", f"--record={out / name}.jsonl", f"--part={options.slice}")
        step(name, "pytest", "-q", *chosen, "-m", marks, *how, *others)
    for number, module in enumerate(MODULES):
        if number % parts == part - 1:
            step(module, module)
    print(*table(report), sep="\n")
    print(*report.lines(f"records in {out}"), sep="\n")
    if report.holds:
        shutil.rmtree(out)
    return 0 if report.holds else 1


def table(report: Report) -> list[str]:
    """Return a line per folder of tests: how many, how many passed, their seconds."""
    rows: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for test in report.records().values():
        row = rows["/".join(test.id.partition("::")[0].split("/")[:2])]
        row[0] += 1
        row[1] += test.outcome == "passed"
        row[2] += test.seconds
    lines = [f"{'tests of':32}{'tests':>7}{'passed':>8}{'seconds':>9}"]
    lines += [f"{name:32}{row[0]:7.0f}{row[1]:8.0f}{row[2]:9.0f}" for name, row in sorted(rows.items())]
    return [*lines, *(f"{step.name:32}{'':15}{step.seconds:9.0f}" for step in report.steps)]


if __name__ == "__main__":
    os.chdir(ROOT)
    raise SystemExit(main())
