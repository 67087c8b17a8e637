"""A program that has trained ends with exit status 0: no thread of gloo outlives the interpreter (`ends`)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import PROGRAM

HERE = Path(__file__).parent


def output_of(*command: str, seconds: float = PROGRAM) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.soak
def test_gloos_threads_end_before_the_interpreter() -> None:
    programs = ("wrappers", "ddp", "from_env", "watched")
    said = output_of(str(HERE / "ends.py"), "4", *programs)
    assert said.count(" of 2: equal") == 2
    left = re.findall(rf"({'|'.join(programs)}) ([01]): (\d+) threads\n", said)  # also amid what ranks print
    assert sorted(left) == sorted((program, rank, "0") for program in programs for rank in "01")


@pytest.mark.soak
def test_all_wrappers_under_torchrun() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert output_of(*launcher, str(HERE / "ends.py"), "wrappers").count(" of 2: equal") == 2


@pytest.mark.soak
@pytest.mark.timeout(5 * PROGRAM)
def test_300_programs_end_beside_two_busy_loops() -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        programs = ("late", "ddp", "pipeline", "from_env", "watched")
        said = output_of(str(HERE / "ends.py"), "150", *programs, seconds=4 * PROGRAM)
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert said.count(": 0 threads\n") == 240  # `late` does not say
