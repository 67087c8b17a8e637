"""Checks on a machine that is busy: right answers and answers that hang, beside many loops that never sleep.

    nice -n 19 python -m tests.classroom.busy_machine                 (20 right, 10 hanging: some minutes)
    nice -n 19 python -m tests.classroom.busy_machine --right 200 --hanging 100      (hours)

A right answer that is refused, or a hang that is not named, ends the program with status 1. An answer that the machine
was too busy to judge is counted: it costs a student nothing. Each answer is judged under the limits of `mk.check`.
Under `nice` the loops and the checks compete with each other, and nobody else on the machine notices.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice

from mpkit.course.catalogue import find
from mpkit.course.framework.room import PackedAnswer, Room
from mpkit.course.framework.source import run_cell
from mpkit.course.judge import Checked, judge

RIGHT = (
    "pass-the-token", "broadcast-by-a-tree", "split-and-average", "naive-ddp", "flat-buffer", "zero-1", "naive-mp",
    "row-parallel", "clip-by-norm", "hang-pairs",
)  # fmt: skip
HANGING = (
    ("pass-the-token", "all-receive-first"),
    ("pass-the-token", "nobody-closes-the-ring"),
    ("hang-pairs", "the-whole-world-for-a-group"),
    ("hang-neighbours", "crossed-receives"),
    ("hang-checkpoint", "gather-by-the-root-only"),
)
"""Exercises, and a mistake of each whose ranks wait for each other."""


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep that many processes computing."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def judge_code(name: str, code: str, room: Room) -> Checked:
    """Return the verdict on an answer with that code."""
    entry = find(name)
    answer = run_cell(code, entry.exercise.name_of_answer, name, entry.given_code)
    return judge(entry, PackedAnswer.pack(answer), room, draw=False)


def verdicts(right: int, hanging: int) -> Iterator[tuple[str, str]]:
    """Yield what became of each answer: its kind and the verdict in a word."""
    room = Room()
    try:
        for name in islice(cycle(RIGHT), right):
            checked = judge_code(name, find(name).source.plain, room)
            verdict = "not judged" if checked.not_judged else "passed" if checked.passed else "REFUSED"
            yield "right", verdict
            if verdict == "REFUSED":
                print(checked)
        for name, mistake in islice(cycle(HANGING), hanging):
            wrong = next(each.wrong for each in find(name).exercise.mistakes if each.name == mistake)
            checked = judge_code(name, wrong, room)
            named = checked.mistake == mistake and not checked.passed
            yield "hanging", "not judged" if checked.not_judged else "named" if named else "NOT NAMED"
            if not named:
                print(checked)
    finally:
        room.close()


def main() -> int:
    """Judge, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.classroom.busy_machine", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--right", type=int, default=20, help="right answers (default: 20)")
    parser.add_argument("--hanging", type=int, default=10, help="answers that hang (default: 10)")
    parser.add_argument("--loops", type=int, default=40, help="busy loops per core (default: 40)")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    counts: Counter[tuple[str, str]] = Counter()
    begun = time.monotonic()
    with busy_loops(options.loops * cores):
        for number, verdict in enumerate(verdicts(options.right, options.hanging), 1):
            counts[verdict] += 1
            print(f"{number:4}  {verdict[0]:8} {verdict[1]:10} {time.monotonic() - begun:7.0f} s", flush=True)
    print(
        f"\n{options.loops} loops per core, {cores} cores:",
        *(f"{n} {k} {v}" for (k, v), n in counts.items()),
        sep="\n",
    )
    return int(any(verdict.isupper() for _, verdict in counts))


if __name__ == "__main__":
    sys.exit(main())
