"""A program that has trained ends with exit status 0: no thread of gloo outlives the interpreter (`ends`)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import PROGRAM

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.soak
@pytest.mark.parametrize("program", ["wrappers", "ddp", "from_env", "watched"])
def test_gloos_threads_end_before_the_interpreter(program: str) -> None:
    command = [sys.executable, *TORCHRUN, str(Path(__file__).parent / "ends.py"), program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
    left = re.findall(rf"{program} ([01]): (\d+) threads\n", done.stdout)  # also amid what ranks print
    assert sorted(left) == [("0", "0"), ("1", "0")]
    assert done.stdout.count(" of 2: equal") == 2 * (program == "wrappers")
