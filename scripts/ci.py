"""`python -m scripts.ci`: check, tests, classroom, browser. `.ci/run` calls it in a clone whose `.venv` is set up.

`check` runs beside the tests that need only one core. Each failed test runs once more, alone; one that passes then is
printed as FLAKY and does not fail the run: it is a bug with a name. The last lines name every test that failed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / ".ci/out"

MINUTES = 75.0
"""The limit of everything, after which what still runs is interrupted and named."""

AGAIN = 20
"""The largest number of failed tests that run again; if there are more, it is not chance."""

TWO = ("-n", "2", "--dist", "worksteal", "-m", "not soak and not alone")
ALONE = [
    str(path) for path in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.alone" in path.read_text("utf-8")
]
"""Modules with tests that run one after the other; importing all others takes as long."""
STEPS = {
    "tests": TWO,
    "classroom and browser": (*TWO, "tests/browser", "tests/classroom"),
    "alone": ("-m", "not soak and alone", *ALONE),
}
"""The arguments of pytest, by step."""

UNTIL = time.monotonic() + 60 * MINUTES


def say(text: str) -> None:
    """Print a line of this script's own."""
    print(f"ci: {text}", flush=True)


def run(command: Sequence[str]) -> int:
    """Run a command in what is left of the time, and return its exit status; 124 if the time is over."""
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)
    for ending in (None, signal.SIGINT, signal.SIGKILL):
        if ending:
            os.killpg(process.pid, ending)
        try:
            status = process.wait(max(UNTIL - time.monotonic(), 0.0) if ending is None else 60.0)
            return 124 if ending else status
        except subprocess.TimeoutExpired:
            say("the time is over")
    return 124


def failed_tests(cache: Path) -> set[str]:
    """Return the tests that pytest's cache names as failed."""
    path = cache / "v/cache/lastfailed"
    return set(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else set()


def run_step(name: str, arguments: Sequence[str]) -> list[str]:
    """Run pytest, and once more what failed; return a line for each failure, and print each flaky test."""
    cache = OUT / name.replace(" ", "-")
    pytest = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={cache}", *arguments]
    began = time.monotonic()
    status = run([*pytest, "--durations=10"])
    failed = failed_tests(cache)
    if 0 < len(failed) <= AGAIN and status == 1:
        say(f"{name}: {len(failed)} failed, and run again alone")
        run([*pytest, "-n", "0", "--lf", "--lfnf=none"])
        for test in sorted(failed - failed_tests(cache)):
            say(f"FLAKY {test}")
        failed = failed_tests(cache)
    say(f"{name}: {time.monotonic() - began:.0f} s")
    lines = [f"FAILED {test}" for test in sorted(failed)]
    broken = status not in (0, 1, 5)  # 5: no test of this kind
    return [*lines, f"FAILED {name}: pytest ended with {status}"] if broken else lines


def main() -> int:
    """Run every step, name what failed, and return the exit status."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    os.environ.setdefault("MPKIT_TEST_LIMITS", "2")
    chromium = subprocess.run(["sh", "scripts/chromium.sh"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    os.environ["CHROMIUM"] = chromium.stdout.strip()
    failures = ["FAILED browser: there is no Chromium"] if chromium.returncode else []
    log = OUT / "check.log"
    for name in ("tests", "classroom and browser"):
        failures += run_step(name, STEPS[name])
    with log.open("w", encoding="utf-8") as output:
        check = subprocess.Popen(["make", "check"], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    failures += run_step("alone", STEPS["alone"])
    if check.wait():
        print(log.read_text(encoding="utf-8"))
        failures.append("FAILED make check: see above")
    for line in failures or ["all passed"]:
        say(line)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
