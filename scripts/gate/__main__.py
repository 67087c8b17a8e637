"""`python -m scripts.gate`: everything that must hold, in a clone whose `.venv` is set up. `.ci/run` calls it.

Tests run on two workers while `check` runs beside them; the classroom's, of which some are drawn where nothing of it
has changed; then those marked `alone`; the browser's; what the change touches; a slice of the soak; and each failed
test again, alone, twice. One that passes both times is FLAKY: it is named, and does not fail the gate. A package or a
browser that cannot be downloaded is reported as not run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from scripts.gate.noise import Noise
from scripts.gate.report import Report
from scripts.gate.steps import Ended, run, say
from scripts.gate.touched import changed_files, last_passed, touched

ROOT = Path(__file__).parents[2]

MINUTES = float(os.environ.get("MPKIT_GATE_MINUTES", "75"))
"""The limit of the whole gate, from its start."""

SLICE = 180.0
"""Seconds of the soak, of which the last quarter is for tests that run alone."""

SAMPLE = 60.0
"""Seconds of the classroom's tests, where nothing of the classroom has changed."""

AGAIN = 20
"""Failed tests that are run again; if there are more, it is not chance."""

CLASSROOM = ("tests/classroom", "notebooks/exercises/solved")
TWO = ("-n", "2", "--dist", "worksteal")


class Gate:
    """The steps in order, the time they have, and what they leave for the report."""

    def __init__(self, root: Path, out: Path) -> None:
        self.root, self.out = root, out
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        self.until = time.monotonic() + 60 * MINUTES - float(os.environ.get("MPKIT_GATE_USED", "0"))
        self.noise, self.report = Noise(), Report(out)
        self.head = _git("rev-parse", "HEAD")
        self.passed = last_passed(ROOT)
        self.changes = touched(ROOT, changed_files(ROOT, self.passed))
        ours = {"MPKIT_PASSED": self.passed or "", "PYTHONUNBUFFERED": "1"}
        self.environment = {"MPKIT_TEST_LIMITS": "2", **os.environ, **ours}

    def run(self) -> int:
        """Run every step, print the report, and return the exit status."""
        say(
            f"{self.head[:9]} {_git('log', '-1', '--format=%s')}; against {(self.passed or 'nothing known')[:9]}"
        )
        checked = threading.Thread(target=self.check)
        chromium = threading.Thread(target=self.find_chromium)
        checked.start()
        chromium.start()
        self.pytest("tests", "not soak and not alone", TWO)
        drawn = () if self.changes.classroom else self.drawn(SAMPLE)
        self.pytest("classroom", "not soak and not alone", (*TWO, *CLASSROOM, *drawn))
        checked.join()
        self.pytest("alone", "not soak and alone")
        if self.changes.classroom:
            self.pytest("classroom alone", "not soak and alone", CLASSROOM)
        chromium.join()
        if "CHROMIUM" in self.environment:
            self.pytest("browser", "not soak", (*TWO, "tests/browser"))
        self.touched()
        self.soak()
        self.again()
        lines = self.report.lines(self.noise.words())
        text = "\n".join(lines)
        try:
            (ROOT.parent / f"{ROOT.name}.gate.txt").write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            say(f"no copy of the report beside the clone: {error}")
        print(text, flush=True)
        return 0 if self.report.holds else 1

    def step(self, name: str, command: Sequence[str], log: Path | None = None) -> Ended | None:
        """Run a step in what is left of the time; None: nothing is left."""
        if time.monotonic() > self.until:
            self.report.steps.append(Ended(name, 1, 0.0, over=True))
            return None
        ended = run(
            name, command, self.until, root=self.root, out=self.out, log=log, environment=self.environment
        )
        self.report.steps.append(ended)
        return ended

    def pytest(
        self, name: str, marks: str, arguments: Iterable[str] = (), *, record: str | None = None
    ) -> None:
        """Run pytest as a step. No test at all (5) is no failure of a part, nor what the time cut off a slice (2)."""
        path = self.out / f"{record or name.replace(' ', '-')}.jsonl"
        self.step(name, [sys.executable, "-m", "pytest", "-q", "-p", "scripts.gate.plugin", f"--record={path}",
                         "-p", "no:cacheprovider", "-m", marks, *arguments])  # fmt: skip

    def check(self) -> None:
        """ruff, format, mypy: beside the tests, its output shown when it has ended."""
        log = self.out / "check.log"
        ended = self.step("check", ["nice", "-n", "5", "make", "check"], log)
        if ended and ended.status:
            print(log.read_text(encoding="utf-8"), flush=True)
            self.report.failed_step("check", log)

    def find_chromium(self) -> None:
        """Find Chromium, or install it: three tries, since a mirror may be in the middle of an update."""
        path = self.download("browser tests", ["sh", "scripts/chromium.sh"])
        if path is not None:
            self.environment["CHROMIUM"] = path

    def download(
        self, name: str, command: Sequence[str], pauses: Sequence[float] = (0, 10, 60)
    ) -> str | None:
        """Return the last line that a script prints which downloads; after three failures note what was not run."""
        said: list[str] = []
        for pause in pauses:
            time.sleep(pause)
            done = subprocess.run(
                command, cwd=self.root, stdin=subprocess.DEVNULL, capture_output=True, text=True
            )
            if done.returncode == 0:
                return done.stdout.strip().rpartition("\n")[2]
            said = done.stderr.strip().splitlines()
            say(f"{name}: " + " | ".join(said[-6:]))
        self.report.not_run.append(
            f"{name}: {' '.join(command)} failed three times: {said[0] if said else '?'}"
        )
        return None

    def touched(self) -> None:
        """Whole notebooks, README's script, the exam's wheels and programs of other systems, where they changed."""
        if self.changes.tests:
            self.pytest("touched", "soak or not soak", (*TWO, *self.changes.tests))
        if self.changes.systems:
            self.download("some of the systems", ["sh", "scripts/systems.sh"])
            for name, module in (("systems", "tests.systems"), ("formats", "tests.systems.accepted")):
                log = self.out / f"{name}.log"
                ended = self.step(name, [sys.executable, "-m", module], log)
                print(log.read_text(encoding="utf-8") if ended else "", flush=True)
                if ended and ended.status:
                    self.report.failed_step(name, log)

    def soak(self) -> None:
        """Run a slice of the soak."""
        began = time.monotonic()
        self.pytest("soak", "soak and not alone", (*TWO, *self.drawn(0.75 * SLICE)))
        left = max(SLICE - (time.monotonic() - began), 0.1 * SLICE)
        self.pytest("soak alone", "soak and alone", self.drawn(left))

    def drawn(self, seconds: float) -> tuple[str, str]:
        """Return options for tests in an order that the commit draws, of which none begins after that time."""
        return f"--draw={self.head}", f"--until={time.time() + seconds}"

    def again(self) -> None:
        """Each failed test alone, twice."""
        failed = self.report.failures()
        over = time.monotonic() > self.until
        for test in failed if len(failed) <= AGAIN and not over else ():
            for attempt in (1, 2):
                self.pytest(f"again {attempt}", "soak or not soak", [test.id], record=f"again-{attempt}")


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    os.chdir(ROOT)
    raise SystemExit(Gate(ROOT, ROOT / ".ci/out").run())
