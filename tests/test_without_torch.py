"""What needs no torch works where there is none, such as in a browser; what does says so at the caller's line.

Each case runs in a fresh interpreter in which `import torch` fails as if it were not installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import mpkit as mk

PACKAGE = Path(mk.__file__).parent

WITHOUT = """
import sys, threading, subprocess
sys.modules["torch"] = None  # import torch raises ModuleNotFoundError


def refused(*args, **kwargs):
    raise AssertionError("a browser has no threads and no processes")


threading.Thread.start = subprocess.Popen.__init__ = refused
import mpkit as mk
"""


def run(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    program = WITHOUT + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *args], capture_output=True, text=True, timeout=120
    )


def printed(code: str, *args: str) -> str:
    done = run(code, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace as a run leaves it: recorded operators, messages and memory."""
    trace = mk.trace_fake(
        lambda: mk.models.MLP(16, 4),
        mk.Plan.pipeline("1f1b", 2, 4),
        batch=(torch.zeros(8, 16), torch.zeros(8, dtype=torch.int64)),
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    return trace.save(tmp_path_factory.mktemp("trace") / "run.mpkit")


def test_layers_that_need_no_torch_import_without_it() -> None:
    text = (Path(mk.__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = re.search(r"These folders import without torch.*?```\n(.*?)```", text, re.DOTALL)
    assert block
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for folder in block[1].split()
        for path in (
            [PACKAGE / "errors.py"] if folder == "errors" else sorted((PACKAGE / folder).glob("*.py"))
        )
        if path.stem != "__init__"
    ]
    assert len(modules) > 150
    printed(f"import importlib\nfor name in {modules!r}: importlib.import_module(name)")


def test_schedules_are_simulated_searched_and_drawn() -> None:
    out = printed("""
        for name in ("naive", "gpipe", "1f1b", "zb_h1", "zb_h2"):
            timeline = mk.simulate(mk.Plan.pipeline(name, 4, 8))
            assert timeline.to_html().startswith("<!doctype html>")
            assert timeline.to_svg().startswith("<svg")
            print(f"{timeline.bubble:.3f}")
        print(mk.search_schedule(mk.Plan.pipeline("1f1b", 2, 4)).seconds)
        print(len(mk.simulate(mk.Plan.gpipe(2, 2)).to_dataframe()))
        print(mk.simulate(mk.Plan.gpipe(4, 8)).diagnose())
    """)
    names = ("naive", "gpipe", "1f1b", "zb_h1", "zb_h2")
    bubbles = [mk.simulate(mk.Plan.pipeline(name, 4, 8)).bubble for name in names]
    assert out.splitlines()[:5] == [f"{bubble:.3f}" for bubble in bubbles]
    assert "16 would take 13.6 % of the step less" in out


def test_a_stored_trace_is_opened_and_replayed_on_other_hardware(stored: Path) -> None:
    out = printed(
        """
        trace = mk.Trace.load(sys.argv[1])
        for name in (None, "8x-a100-nvlink", "4x8-h100-ib"):
            print(repr(mk.Timeline.of(trace, hardware=name)))
        """,
        str(stored),
    )
    trace = mk.Trace.load(stored)
    same = [repr(mk.Timeline.of(trace, hardware=name)) for name in (None, "8x-a100-nvlink", "4x8-h100-ib")]
    assert out.splitlines() == same


def test_fits_estimate_and_advise_answer_the_same() -> None:
    asked = """
        plan = mk.Plan.zero(3, 8)
        print(mk.fits("llama3-8b", plan, "8x-a100-nvlink", batch=8, sequence=4096))
        print(mk.estimate("llama3-8b", plan, "8x-a100-nvlink", global_batch=8, sequence=4096))
        print(mk.advise("llama3-8b", "8x-a100-nvlink", global_batch=64, sequence=4096).plans[0])
    """
    out = printed(asked)
    plan = mk.Plan.zero(3, 8)
    assert str(mk.fits("llama3-8b", plan, "8x-a100-nvlink", batch=8, sequence=4096)) in out
    assert str(mk.advise("llama3-8b", "8x-a100-nvlink", global_batch=64, sequence=4096).plans[0]) in out


def test_the_explorer_follows_its_sliders() -> None:
    out = printed("""
        explorer = mk.explore("1f1b", "zb_h1", ranks=4, microbatches=6)
        print(explorer.sides[0].explored.figures["bubble"])
        explorer.sliders["microbatches"].value = 12
        print(explorer.sides[0].explored.figures["bubble"])
        explorer.sides[0].train.click()
        print(explorer.sides[0].result.value)
    """)
    before, after, *said = out.splitlines()
    assert float(before.split()[0]) > float(after.split()[0])
    assert "needs PyTorch to run or read models" in said[0]


@pytest.mark.parametrize(
    "call",
    [
        "mk.Cluster(ranks=2)",
        "mk.trace_fake",
        "mk.models.MLP()",
        "mk.find_cut(None, None, 2)",
        "mk.experiments.soap",
        "mk.ddp",
    ],
)
def test_what_needs_torch_says_so_at_the_callers_line(call: str) -> None:
    done = run(f"def lesson():\n    {call}\n\nlesson()")
    *above, frame = done.stderr.partition("mpkit.errors.NeedsTorch: ")[0].splitlines()
    name = call.partition("(")[0].split(".")[1]
    assert (
        f"NeedsTorch: mk.{name} needs PyTorch to run or read models, and this Python has none" in done.stderr
    )
    assert 'mk.simulate(mk.Plan.pipeline("1f1b", 4, 8))' in done.stderr
    assert "in lesson" in frame and not any("mpkit" in line for line in above)


def test_an_import_of_the_callers_own_stays_its_own_error() -> None:
    done = run("""
        def rows(p, m):
            import torch

        mk.Schedule(rows, p=2, m=2)
    """)
    assert "ModuleNotFoundError" in done.stderr and "NeedsTorch" not in done.stderr
