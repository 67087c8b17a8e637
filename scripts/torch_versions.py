"""`python -m scripts.torch_versions`: the core of the tests with the oldest torch that mpkit takes and the newest.

Each has an environment of its own in build/, which holds that torch and what it needs; everything else is that of the
environment that runs this. A torch that cannot be installed here is named, and is no failure. `make soak` runs this.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from mpkit.common.torch_private import SEEN

ROOT = Path(__file__).parents[1]

REQUIREMENTS = (f"torch=={SEEN[0]}.*", f"torch>={SEEN[-2]}")
"""The oldest, and the newest that this machine's index and constraints give."""

CORE = (
    "tests/repository/test_torch_private.py",
    *(f"tests/{each}" for each in ("pipeline", "data_parallel", "zero", "tensor", "context", "experts", "mesh")),
    *(f"tests/{each}" for each in ("partition", "training", "proof", "wrap", "checkpoint", "dry_run")),
    "tests/record", "tests/watch",
    *(f"tests/test_{each}.py" for each in ("prepare", "models", "run")),
    "mpkit/common", "mpkit/strategies", "mpkit/trace",
)  # fmt: skip
"""What trains, records, plays and proves: all that asks torch for more than tensors."""


def environment(requirement: str) -> Path | None:
    """Return the Python of an environment with this torch, made where it is not there; None: it cannot be."""
    folder = ROOT / "build" / re.sub(r"\W+", "-", requirement).strip("-")
    python = folder / "bin" / "python"
    if (folder / "whole").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    uv = shutil.which("uv")
    installs = [[python, "-m", "pip", "install", "--no-input", "--progress-bar", "off", requirement]]
    if uv:  # the CPU's build, where the index of torch's own builds can be reached
        installs.insert(0, [uv, "pip", "install", "--python", python, "--torch-backend=cpu", requirement])
    for command in installs:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            break
        print(f"{requirement}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    else:
        return None
    # After its own packages those of the environment that runs this, editable ones too.
    own = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    rest = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (Path(own) / "rest.pth").write_text(rest, encoding="utf-8")
    (folder / "whole").touch()
    return python


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests with each torch, and return the exit status: 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="python -m scripts.torch_versions", description=__doc__)
    parser.add_argument("--torch", action="append", metavar="torch==VERSION")
    options, others = parser.parse_known_args(arguments)
    status = 0
    for asked in options.torch or REQUIREMENTS:
        python = environment(asked)
        if python is None:
            print(f"NOT RUN {asked}: it cannot be installed here")
            continue
        print(f"{asked}:", flush=True)
        marks = ("-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", "-m", "not soak and not slow")
        ended = subprocess.run(
            [python, "-m", "pytest", "-q", *marks, *(others or CORE)],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        status = status or int(ended.returncode != 0)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
