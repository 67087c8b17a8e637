"""`%%ranks`: cells on the ranks of a group that stays, in IPython's own shell."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import CapturedIO, capture_output

from mpkit.launch.notebook.magics import RankMagics

Run = Callable[..., CapturedIO]


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    """A shell of its own, with the extension, and 3 ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VIRTUAL_ENV", raising=False)  # another one, of which IPython would warn
        made = InteractiveShell.instance()
    made.run_line_magic("colors", "nocolor")
    made.run_line_magic("load_ext", "mpkit")
    made.run_cell("%%ranks 3\npass")
    yield made
    made.run_line_magic("ranks_reset", "")
    InteractiveShell.clear_instance()


@pytest.fixture
def run(shell: InteractiveShell) -> Run:
    """`run(code)` runs a cell, and returns what it showed; with fails=True it has to fail."""

    def run(code: str, fails: bool = False) -> CapturedIO:
        with capture_output() as shown:
            result = shell.run_cell(code, store_history=True)
        assert result.success is not fails, shown.stdout + shown.stderr
        return shown

    return run


def texts(shown: CapturedIO) -> list[str]:
    return [output.data["text/plain"] for output in shown.outputs]


def session(shell: InteractiveShell) -> Any:
    (magics,) = [each for each in shell.magics_manager.registry.values() if isinstance(each, RankMagics)]
    return magics.session


@pytest.mark.slow
def test_variables_stay_on_each_rank(run: Run, shell: InteractiveShell) -> None:
    shown = run("%%ranks\nx = rank + 1\nprint('rank', rank, 'of', world_size)\nx * 10")
    assert sorted(shown.stdout.splitlines()) == [f"[rank {r}] rank {r} of 3" for r in range(3)]
    assert texts(shown) == ["[rank 0] 10", "[rank 1] 20", "[rank 2] 30"]
    shown = run("%%ranks\ntotal = torch.tensor([x])\ncomm.all_reduce(total)\ndist.all_reduce(total)\ntotal")
    assert texts(shown) == ["[ranks 0-2] tensor([18])"]
    assert texts(run("%%ranks\ndef f():\n    return ctx.rank\nf();")) == []
    assert texts(run("%%ranks 0,2\nf()")) == ["[rank 0] 0", "[rank 2] 2"]
    assert texts(run("%%ranks\nx")) == ["[rank 0] 1", "[rank 1] 2", "[rank 2] 3"]
    assert texts(run("%%ranks 1,\nx")) == ["[rank 1] 2"]
    assert texts(run("%%ranks 3\nx"))[0] == "[rank 0] 1"  # the first cell again
    assert shell.user_ns["ranks"]["x + 1"] == [2, 3, 4]
    assert shell.user_ns["ranks"]["total"][2].tolist() == [18]
    with pytest.raises(NameError, match=r"on rank \d, NameError: name 'nothing'"):
        shell.user_ns["ranks"]["nothing"]


def test_classes_of_a_cell_can_be_fetched(run: Run, shell: InteractiveShell) -> None:
    run("%%ranks\nclass Point:\n    def __init__(self, x):\n        self.x = x\np = Point(rank)")
    assert [point.x for point in shell.user_ns["ranks"]["p"]] == [0, 1, 2]


def test_errors_say_where_in_the_cell_and_variables_stay(run: Run, shell: InteractiveShell) -> None:
    shown = run("%%ranks\nz = 5\nif rank == 1:\n    1 / 0\nz", fails=True)
    assert texts(shown) == ["[ranks 0,2] 5"]
    number = shell.execution_count - 1
    assert shown.stdout.splitlines()[0] == "rank 1 of 3: ZeroDivisionError: division by zero"
    assert f'  File "Cell In[{number}]", line 4, in <module>' in shown.stdout
    assert "mpkit" not in shown.stdout and "site-packages" not in shown.stdout
    assert texts(run("%%ranks\nz")) == ["[ranks 0-2] 5"]
    shown = run("%%ranks\nraise SystemExit('over')", fails=True)
    assert shown.stdout.startswith("ranks 0-2 of 3: SystemExit: over")
    shown = run("%%ranks\nx = 1\nfor = 2", fails=True)
    assert f'File "Cell In[{shell.execution_count - 1}]", line 3' in shown.stdout
    assert "SyntaxError" in shown.stdout


def test_all_that_a_cell_prints_is_shown_with_it(run: Run) -> None:
    shown = run("%%ranks\nfor _ in range(300):\n    print('y' * 100_000)")
    lines = shown.stdout.splitlines()
    assert (
        sum(line.endswith("(more than 10,000,000 bytes printed: the rest is left out)") for line in lines)
        == 3
    )
    assert len(shown.stdout) > 3 * 10_000_000
    assert run("%%ranks\npass").stdout == ""


INTERRUPT = f"import os, time\ncomm.barrier()\nif rank == 1: os.kill({os.getpid()}, 2)\n"
"""Begins a cell. Once all ranks run it, rank 1 does what the notebook's stop button does: it signals the kernel."""


@pytest.mark.alone
def test_an_interrupt_ends_the_cell_and_leaves_variables(run: Run, shell: InteractiveShell) -> None:
    run("%%ranks\nkept = rank")
    run(f"%%ranks\n{INTERRUPT}while True: time.sleep(0.1)", fails=True)
    assert texts(run("%%ranks\nkept")) == ["[rank 0] 0", "[rank 1] 1", "[rank 2] 2"]


@pytest.mark.parametrize(("cell", "says"), [
    ("%%ranks 2\nx", "with a comma runs a cell on rank 2 alone"),
    ("%%ranks 0,7\nx", "there is no rank 7"),
    ("%%ranks first\nx", "such as 0,2, or none for all"),
    ("%ranks_reset 4", "then %%ranks 4 starts others"),
])  # fmt: skip
def test_mistyped(run: Run, cell: str, says: str) -> None:
    shown = run(cell, fails=True)
    assert says in shown.stderr + shown.stdout


def test_a_hang_is_reported_and_new_ranks_start(run: Run, shell: InteractiveShell) -> None:
    """Last, since it costs the ranks."""
    shown = run("%%ranks 0,1\ncomm.barrier()", fails=True)
    assert "rank 2 never came to barrier" in shown.stdout and "ran on ranks 0-1 of 3 only" in shown.stdout
    assert "their variables are gone" in shown.stdout


@pytest.mark.slow
def test_a_rank_that_dies_between_two_cells_ends_the_session_with_the_reason(
    run: Run, shell: InteractiveShell
) -> None:
    assert len(texts(run("%%ranks 3\nrank"))) == 3  # new ranks, after the hang
    os.kill(session(shell).pids[1], signal.SIGKILL)
    shown = run("%%ranks\nrank", fails=True)
    assert "rank 1 of 3 was killed by SIGKILL" in shown.stdout and "their variables are gone" in shown.stdout
