"""Judging answers in a process of its own, because answers run on its ranks and could end it.

    python -m mpkit.course.grading.judge_process FOLDER WAY

    in    one JSON line per answer: the exercise, the file with the packed answer, a token
    out   one JSON line per verdict, with the token; an empty line each second shows that the process is alive

`Judges` is the other end: it starts the process, and restarts it if an answer has ended it. A verdict is plain data;
nothing else is accepted from a process that a student's code may have tampered with.

The token is a secret of these two. The process closes its memory and pipes to others, its ranks are enclosed within its
own enclosure (`ranks_apart`), and it writes a verdict when everything that the answer has started is ended.
"""

import contextlib
import json
import linecache
import os
import secrets
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from mpkit.common.process_wide import make_undumpable
from mpkit.course.catalogue import ExerciseEntry, find, solution_folders
from mpkit.course.framework.room import PackedAnswer, Room
from mpkit.course.judge import judge
from mpkit.course.sandbox.allowance import Limits
from mpkit.course.sandbox.fair_clock import FairClock
from mpkit.course.sandbox.guard import (
    Guard,
    adopt_orphans,
    enclose_command,
    list_descendants,
    sweep,
    way_to_enclose,
)
from mpkit.course.sandbox.ranks_apart import RanksApart
from mpkit.course.verdict import Checked, checked_of, verdict_json

FAILURES = 1
"""The number of failures that reports assume: they give the second hint, as the student has tried already."""

SILENT = 20.0
"""Seconds without a sign of life after which the process counts as stopped (`FairClock`)."""

LONGEST_TIME = 900.0
"""Seconds after which an answer is given up: no exercise's cases take as long (`FairClock`)."""

LONGEST = 32 * 2**20
"""The most bytes of a verdict."""


class Judges:
    """One judging process at a time.

    Args:
        place: the only folder that the process may write to; its ranks write to a folder in it.
        environment: the environment variables of the process.
        limits: the limits on all of its processes together.
        way: how it and its ranks are enclosed, one of `enclose.WAYS`; None: the first that works here.
    """

    def __init__(
        self, place: Path, environment: dict[str, str], limits: Guard, way: str | None = None
    ) -> None:
        ranks, self._way = place / "ranks", way or way_to_enclose()
        ranks.mkdir()
        self._command = [
            sys.executable,
            "-P",
            "-m",
            "mpkit.course.grading.judge_process",
            str(ranks),
            self._way,
        ]
        self._place, self._environment, self._limits = place, environment, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # held while one is started

    def pids(self) -> set[int]:
        """Return the id of the current judging process, if there is one; other threads may call this."""
        with self._lock:
            return {self._process.pid} if self._process is not None else set()

    def judge(self, entry: ExerciseEntry, packed: bytes) -> tuple[Checked | None, str]:
        """Judge an answer; return the verdict and "", or None and the reason why there is no verdict."""
        process = self._ensure_process()
        assert process.stdin is not None
        token = secrets.token_hex()
        file = self._place / "answer"
        file.write_bytes(packed)  # not into the pipe, which would block if nobody reads it any more
        request = {"token": token, "exercise": entry.name, "packed": str(file)}
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            verdict, why = self._verdict(process, token)
        except OSError:
            verdict, why = None, "it ended the process that judged it"
        finally:
            file.unlink(missing_ok=True)
        if verdict is None:
            self.close()
            return None, why
        try:
            return checked_of(entry, verdict), ""
        except (KeyError, TypeError, ValueError):  # our own code never writes such a verdict
            self.close()
            return None, "it wrote a verdict of its own"

    def close(self) -> None:
        """End the judging process and all of its descendants."""
        if self._process is None:
            return
        for each in reversed(list_descendants(self._process.pid)):
            with contextlib.suppress(psutil.Error):
                each.kill()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # raised for data that the process had not read yet
                    pipe.close()
        self._process = None

    def _ensure_process(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            command = enclose_command(self._command, self._place, self._limits.hidden, self._way)
            with self._lock:
                self._process = subprocess.Popen(
                    command, cwd=self._place, env=self._environment, start_new_session=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
                )  # fmt: skip
        return self._process

    def _verdict(self, process: subprocess.Popen[bytes], token: str) -> tuple[dict[str, Any] | None, str]:
        assert process.stdout is not None
        silence, all_of_it, pending = FairClock(), FairClock(), b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                if selector.select(0.2):
                    chunk = os.read(process.stdout.fileno(), 2**20)
                    if not chunk:
                        return None, "it ended the process that judged it"
                    silence = FairClock()
                    *lines, pending = (pending + chunk).split(b"\n")
                    for line in lines:
                        if line and (said := _verdict_line(line, token)):
                            return said, ""
                running = list_descendants(process.pid)
                if why := self._limits.exceeded_limit(running):
                    return None, why
                pids = [each.pid for each in running]
                if all_of_it.look(pids) > LONGEST_TIME:
                    return None, f"it kept the process that judged it for more than {LONGEST_TIME:g} s"
                if silence.look(pids) > SILENT or len(pending) > LONGEST:
                    return None, "it stopped the process that judged it"


def _verdict_line(line: bytes, token: str) -> dict[str, Any] | None:
    """Return the verdict in a line, if it is one on this answer."""
    try:
        message = json.loads(line)
        return message["verdict"] if secrets.compare_digest(message["token"], token) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def main(folder: str, way: str) -> None:
    """Judge the answers that arrive on stdin, until it ends; ranks write to the folder, enclosed in that way."""
    make_undumpable()
    os.environ["TMPDIR"] = tempfile.tempdir = folder  # where launches make their folders
    os.chdir(folder)
    lock, out = threading.Lock(), os.dup(1)
    os.dup2(2, 1)

    def say(line: bytes) -> None:
        with lock:
            while line:
                line = line[os.write(out, line) :]

    def live() -> None:
        while True:
            say(b"\n")
            time.sleep(1.0)

    threading.Thread(target=live, daemon=True).start()
    adopt_orphans()
    cluster = RanksApart(Path(folder), [str(path) for path in solution_folders()], way)
    room = Room(cluster, Limits(memory=2**30))
    try:
        for line in sys.stdin:
            linecache.clearcache()  # of wrong answers to an earlier exercise: ranks get what is in it
            request = json.loads(line)
            entry = find(request["exercise"])
            answer = PackedAnswer(Path(request["packed"]).read_bytes(), entry.exercise.name_of_answer)
            verdict = verdict_json(judge(entry, answer, room, FAILURES, draw=False))
            cluster.clear()
            sweep(lambda: room.pids)
            say(json.dumps({"token": request["token"], "verdict": verdict}).encode() + b"\n")
    finally:
        room.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
