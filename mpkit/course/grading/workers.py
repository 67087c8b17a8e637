"""Grading several notebooks at a time, each in a grading process of its own.

    python -m mpkit.course.grading.workers GUARD

    in     one JSON line per notebook, as `HandedIn.to_json` has it
    out    one JSON line per grade, as `Grade.to_json` has it

A grading process ends all of its descendants after each notebook, which is why there is one for each job: none ends
what belongs to another. A notebook that ends its grading process is tried once more in a fresh one, since it may have
been another notebook that did it; then it has no points.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace

import psutil

from mpkit.common.this_process import make_undumpable
from mpkit.course.grading.grader import Grader
from mpkit.course.grading.grades import Grade
from mpkit.course.grading.submissions import HandedIn
from mpkit.course.sandbox.guard import Guard, adopt_orphans, list_descendants, sweep

__all__ = ["in_parallel"]

ENDED = "it ended the process that graded it, twice"


def in_parallel(submissions: Sequence[HandedIn], guard: Guard, jobs: int) -> Iterator[Grade]:
    """Yield the grades of notebooks as they are finished, a number of them at a time."""
    with tempfile.TemporaryDirectory(prefix="mpkit-grade-", ignore_cleanup_errors=True) as place:
        idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        guard = replace(guard, hidden=(*guard.hidden, place))
        workers = [_Worker(guard, place) for _ in range(min(jobs, len(submissions)))]
        for worker in workers:
            idle.put(worker)

        def work(each: HandedIn) -> Grade:
            worker = idle.get()
            try:
                return worker.grade(each)
            finally:
                idle.put(worker)

        with ThreadPoolExecutor(len(workers) or 1) as pool:
            coming = [pool.submit(work, each) for each in submissions]
            try:
                for done in as_completed(coming):
                    yield done.result()
            finally:
                for each in coming:
                    each.cancel()
                for worker in workers:
                    worker.close()
                sweep(set)


class _Worker:
    """One grading process at a time, started when it is needed."""

    def __init__(self, guard: Guard, place: str) -> None:
        self._command = [sys.executable, "-P", "-m", __name__, json.dumps(asdict(guard))]
        path = os.pathsep.join(part for part in sys.path if part)
        self._environment = os.environ | {"PYTHONPATH": path, "TMPDIR": place}
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()  # held while a process is started or given up

    def grade(self, each: HandedIn) -> Grade:
        """Return the grade of a notebook; none of its exercises has points if it ends the process twice."""
        for _ in range(2):
            try:
                return Grade.of_json(each, self._ask(each))
            except (OSError, ValueError, TypeError, KeyError, AttributeError):  # ended, or not our own words
                self._end()
        return Grade(each, dict.fromkeys(entry.name for entry in each.exercises), [ENDED])

    def close(self) -> None:
        """End the process and its descendants, and start no other."""
        with self._lock:
            self._closed = True
        self._end()

    def _ask(self, each: HandedIn) -> dict[str, object]:
        process = self._ensure_process()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(each.to_json()).encode() + b"\n")
        process.stdin.flush()
        return dict(json.loads(process.stdout.readline()))

    def _ensure_process(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise ValueError("the grading is over")
            if self._process is None:
                self._process = subprocess.Popen(
                    self._command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
            return self._process

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        for each in reversed(list_descendants(process.pid)):
            with contextlib.suppress(psutil.Error):
                each.kill()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def main(guard: str) -> None:
    """Grade the notebooks that arrive on stdin, until it ends; the limits are a `Guard` in JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process ends it
    if sys.platform == "linux":
        dies_with_parent = 1
        ctypes.CDLL(None, use_errno=True).prctl(dies_with_parent, signal.SIGKILL, 0, 0, 0)
    adopt_orphans()
    make_undumpable()
    with Grader(Guard(**json.loads(guard))) as grader:
        for line in sys.stdin:
            grade = grader.grade(HandedIn.of_json(json.loads(line)))
            print(json.dumps(grade.to_json()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
