"""What needs no torch works where there is none; what needs it says so at the caller's line.

Each case runs in a fresh interpreter in which `import torch` fails as if it were not installed.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mpkit as mk
from tests.limits import PROGRAM

PACKAGE = Path(mk.__file__).parent

NEEDS_NO_TORCH = (
    "common",
    "plan",
    "devices/catalogue",
    "timeline",
    "prediction/cost_model",
    "prediction/advice",
    *(
        f"views/{each}"
        for each in ["browser", "drawing", "memory", "timeline", "page", "placement", "dashboard"]
    ),
)
"""Folders whose modules all import without torch; so do the modules at the top of `trace`, `devices` and `views`."""

WITHOUT = """
import sys
sys.modules["torch"] = None  # import torch raises ModuleNotFoundError
import mpkit as mk
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT + code], capture_output=True, text=True, timeout=PROGRAM
    )


def test_folders_that_need_no_torch_import_without_it() -> None:
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for folder in NEEDS_NO_TORCH
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        if path.stem != "__init__"
    ]
    assert len(modules) > 50
    done = run(f"import importlib\nfor name in {modules!r}: importlib.import_module(name)")
    assert done.returncode == 0, done.stderr


def test_schedules_and_predictions_are_the_same_without_it() -> None:
    calls = (
        'mk.simulate(mk.Plan.pipeline("zb_h1", 4, 8)).bubble',
        'mk.fits("llama3-8b", mk.Plan.zero(3, 8), "8x-a100-nvlink", global_batch=8, sequence=4096)',
        'mk.advise("llama3-8b", "8x-a100-nvlink", global_batch=64, sequence=4096).plans[0]',
    )
    done = run("\n".join(f"print({call})" for call in calls))
    assert done.stdout == "".join(f"{eval(call, {'mk': mk})}\n" for call in calls), done.stderr


@pytest.mark.parametrize("call", ["mk.Cluster(ranks=2)", "mk.models.MLP()"])
def test_what_needs_torch_says_so_at_the_callers_line(call: str) -> None:
    done = run(f"def lesson():\n    {call}\n\nlesson()")
    *above, frame = done.stderr.partition("mpkit.errors.NeedsTorch: ")[0].splitlines()
    name = re.match(r"mk\.(\w+)", call)[1]
    assert (
        f"NeedsTorch: mk.{name} needs PyTorch to run or read models, and this Python has none" in done.stderr
    )
    assert "in lesson" in frame and not any("mpkit" in line for line in above)
