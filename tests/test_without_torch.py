"""What needs no torch works where there is none, such as in a browser; what does says so at the caller's line.

Each case runs in a fresh interpreter in which `import torch` fails as if it were not installed.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import mpkit as mk
from mpkit.course import lab

PACKAGE = Path(mk.__file__).parent

NEEDS_NO_TORCH = (
    "common",
    "plan",
    "devices/catalogue",
    "timeline",
    "prediction/cost_model",
    "prediction/advice",
    "prediction/experts",
    *(
        f"views/{each}"
        for each in (
            "browser",
            "drawing",
            "experts",
            "memory",
            "gpu",
            "timeline",
            "page",
            "traffic",
            "placement",
            "comparison",
            "dashboard",
            "soap",
            "checkup",
        )
    ),
)
"""Folders whose modules all import without torch; so do the modules at the top of `trace`, `devices` and `views`."""

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


def test_folders_that_need_no_torch_import_without_it() -> None:
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for folder in NEEDS_NO_TORCH
        for path in sorted((PACKAGE / folder).rglob("*.py"))
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
        print(mk.fits("llama3-8b", plan, "8x-a100-nvlink", global_batch=8, sequence=4096))
        print(mk.estimate("llama3-8b", plan, "8x-a100-nvlink", global_batch=8, sequence=4096))
        print(mk.advise("llama3-8b", "8x-a100-nvlink", global_batch=64, sequence=4096).plans[0])
    """
    out = printed(asked)
    plan = mk.Plan.zero(3, 8)
    assert str(mk.fits("llama3-8b", plan, "8x-a100-nvlink", global_batch=8, sequence=4096)) in out
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


WRONG = {
    "which-collective": "gather-or-all-gather",
    "count-the-bytes": "divides-everything",
    "one-f-one-b": None,
    "balance": "equal-numbers-of-layers",
    "choose-the-degrees": None,
    "double-the-link": "halves-the-step",
    "an-uneven-pipeline": "counts-stages-from-1",
    "ring-or-tree": "one-way-ring",
}
"""Exercises that need no torch, one or more of each family, and a mistake of each; None: the first one."""


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the browser edition has it: with the traces of runs that an exercise reads."""
    folder = tmp_path_factory.mktemp("course")
    for letter in "ABC":
        lab.puzzle("double-the-link", letter, "ABC")
    (folder / lab.SAVED).mkdir()
    lab.save_runs(folder / lab.SAVED)
    return folder


def test_exercises_that_need_no_ranks_are_checked(course: Path) -> None:
    out = printed(
        f"""
        import os
        from mpkit.course.catalogue import find
        from mpkit.course.framework.source import run_cell

        os.chdir(sys.argv[1])
        for name, mistake in {WRONG!r}.items():
            entry = find(name)
            chosen = next(each for each in entry.exercise.mistakes if mistake in (None, each.name))
            for code in (entry.source.plain, entry.source.stub, chosen.wrong):
                answer = run_cell(code, entry.exercise.name_of_answer, "a cell", entry.given_code)
                checked = mk.check(name, answer)
                print(name, checked.passed, checked.mistake, checked.mistake == chosen.name)
                assert checked._repr_mimebundle_()["text/html"]
        print(mk.progress())
        """,
        str(course),
    )
    judged, _, progress = out.partition("\nRanks and messages: 1 of 1")
    rows = [line.split() for line in judged.splitlines()]
    assert [row[1] for row in rows] == ["True", "False", "False"] * len(WRONG)
    assert all(row[-1] == "True" for row in rows[2::3]), judged
    assert "Pipelines: 2 of 9" in progress and "Reading lab: 2 of 7" in progress
    assert "pass-the-token" not in progress


def test_an_error_in_an_answer_is_said_with_its_line(tmp_path: Path) -> None:
    out = printed(
        """
        import os
        from mpkit.course.framework.source import run_cell

        os.chdir(sys.argv[1])
        code = "def balance(seconds, p):\\n    print('cut', p)\\n    return seconds[len(second):]\\n"
        checked = mk.check("balance", run_cell(code, "balance", "a cell"))
        print(checked, checked.printed)
        """,
        str(tmp_path),
    )
    assert "NameError: name 'second' is not defined" in out
    assert "line 3 of the cell, in balance: return seconds[len(second):]" in out
    assert "('cut 3',)" in out and "rank 0" not in out


@pytest.mark.parametrize("name", ["pass-the-token", "loss-scale", "zero-3", "one-device"])
def test_an_exercise_that_needs_torch_says_so(name: str) -> None:
    done = run(f"def lesson():\n    mk.check({name!r}, print)\n\nlesson()")
    *above, frame = done.stderr.partition("mpkit.errors.NeedsTorch: ")[0].splitlines()
    assert f"NeedsTorch: mk.check('{name}', ...) runs answers with PyTorch" in done.stderr
    assert "mk.progress() lists the exercises that work here" in done.stderr
    assert "in lesson" in frame and not any("mpkit" in line for line in above)


def test_notebooks_have_the_exercises_that_work_here() -> None:
    out = printed("""
        from mpkit.course.notebooks import notebooks

        for path, book in notebooks():
            checks = [cell.source for cell in book.cells if "mk.check(" in cell.source]
            assert "import torch" not in next(cell.source for cell in book.cells if cell.id == "imports")
            print(path, len(checks))
    """)
    students = [line.split() for line in out.splitlines() if "/" not in line]
    assert ["4-pipelines.ipynb", "9"] in students and ["9-reading-lab.ipynb", "7"] in students
    assert not any(name.startswith("7-hang-lab") for name, _ in students)


@pytest.mark.parametrize(
    "call",
    [
        "mk.Cluster(ranks=2)",
        "mk.trace_fake",
        "mk.models.MLP()",
        "mk.find_cut(None, None, 2)",
        "mk.ddp",
    ],
)
def test_what_needs_torch_says_so_at_the_callers_line(call: str) -> None:
    done = run(f"def lesson():\n    {call}\n\nlesson()")
    *above, frame = done.stderr.partition("mpkit.errors.NeedsTorch: ")[0].splitlines()
    name = call.partition("(")[0].removeprefix("mk.")
    name = name.partition(".")[0]
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
