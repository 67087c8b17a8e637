"""RankSession: ranks that stay, and run one cell after another; variables persist on each rank.

It is one long launch whose function takes requests (`on_rank`). Between cells nobody looks at the launch: ranks
sleep, and an idle group is not a hang. While a cell runs, the notebook's own thread looks at it as at any run:

    ask         write the request, wake the chosen ranks
    wait        show their output; look for hangs; collect answers
    interrupt   interrupt the cell on the ranks; a rank that goes on for long (in C++ code) is ended, with the session

A session is ended, and its variables are gone, when a rank dies or the ranks hang. The next cell starts a new one.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpkit.common.disk import write_whole
from mpkit.common.launch_folder import part
from mpkit.common.safe_text import visible
from mpkit.common.tracebacks import internals_shown, public
from mpkit.errors import Deadlock, MpkitError, RankFailed
from mpkit.launch.hang.hang import spelt
from mpkit.launch.launch import Launch
from mpkit.launch.notebook.on_rank import Reply, serve
from mpkit.launch.session.cluster import Cluster
from mpkit.timeline.timeline import Timeline
from mpkit.trace import MEMORY, RankTrace, Trace

POLL = 0.01
"""Seconds between two looks for answers."""

INTERRUPT_TAKES = 3.0
"""Seconds within which an interrupted cell ends on a rank that runs Python code."""

LOST = "The ranks were ended, and their variables are gone; the next %%ranks cell starts new ones."


class SessionEnded(MpkitError):
    """The session has no ranks any more."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows, without the frames of the notebook's own process."""
        return str(self).splitlines()


@public
class RankSession:
    """A group of ranks that stays.

    Attributes:
        cluster: the cluster; for trainings, make another.
        ranks: their number.
    """

    def __init__(self, ranks: int) -> None:
        self.cluster, self.ranks = Cluster(ranks), ranks
        self._number = 0
        self._began: dict[int, int] = {}  # by rank, the ops before the latest cell that added some
        launch = self.cluster.launch(serve, ())
        assert isinstance(launch, Launch)  # these ranks are started here, by no launcher
        self._launch = launch
        try:
            self._wait(list(range(ranks)), 0)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        state = "ended" if self.has_ended else f"{self.cluster.device}, {self.cluster.backend}"
        return f"<{self.ranks} ranks ({state}): %%ranks runs a cell on all of them>"

    @property
    def has_ended(self) -> bool:
        """Whether the ranks are gone."""
        return self._launch.has_ended

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids."""
        return self._launch.pids

    def close(self) -> None:
        """End the ranks."""
        self._launch.end()
        self.cluster.close()

    # ---- cells --------------------------------------------------------------------------------------------

    def run(self, code: str, ranks: Sequence[int] | None = None, *, name: str = "cell") -> dict[int, Reply]:
        """Run code on some ranks, by default on all, and return their answers by rank.

        Args:
            code: Python code.
            ranks: the ranks.
            name: what tracebacks call the cell.

        Raises:
            SessionEnded: a rank died, the ranks hang, or could not be interrupted.
            KeyboardInterrupt: the cell was interrupted; the ranks keep their variables.
        """
        chosen = list(range(self.ranks)) if ranks is None else list(ranks)
        answers = self._ask(code, name, chosen)
        if any(each.recorded for each in answers.values()):
            self._began = {rank: each.ops for rank, each in answers.items()}
        return answers

    def timeline(self) -> Timeline:
        """Put the latest cell that recorded anything on a clock: what its ranks computed, sent and waited for."""
        trace = self._launch.trace
        ranks = [_trace_since(rank, self._began.get(number)) for number, rank in enumerate(trace.ranks)]
        if not any(len(rank.ops) for rank in ranks):
            raise MpkitError(
                "no cell has recorded anything: comm.all_reduce(...) does, and `with ctx.record.span('name'):`"
            )
        return Timeline.of(Trace(ranks, trace.meta))

    def __getitem__(self, name: str) -> list[Any]:
        """Return the value of a variable, or of an expression, by rank; tensors on the CPU.

        Raises:
            NameError: a rank has no such variable.
        """
        answers = self._ask(name, f"ranks[{name!r}]", list(range(self.ranks)), wants_value=True)
        for rank, each in answers.items():
            if each.state == "error":
                kind = NameError if each.error["type"] == "NameError" else MpkitError
                raise kind(f"ranks[{name!r}]: on rank {rank}, {each.error['type']}: {each.error['message']}")
        return [pickle.loads(answers[rank].value) for rank in range(self.ranks)]

    # ---- requests -----------------------------------------------------------------------------------------

    def _ask(self, code: str, name: str, ranks: list[int], wants_value: bool = False) -> dict[int, Reply]:
        if self.has_ended:
            raise SessionEnded("these ranks are gone; the next %%ranks cell starts new ones")
        self._number += 1
        request = pickle.dumps((code, name, wants_value))
        write_whole(self._launch.folder / f"request{self._number}.pkl", request)
        return self._wait(ranks, self._number, list(ranks))

    def _wait(self, ranks: list[int], number: int, asleep: Sequence[int] = ()) -> dict[int, Reply]:
        """Wake those that are asleep, and return the answers of all; an interrupt at any moment is passed on."""
        answers: dict[int, Reply] = {}
        deadline: float | None = None  # once interrupted
        while True:
            try:
                while asleep and not self._launch.has_ended:
                    try:
                        wake(self._launch.folder, asleep[0], number)
                    except OSError:  # nobody reads that pipe: the rank has died between two cells
                        self._launch.poll(POLL)
                        continue
                    asleep = asleep[1:]
                for rank in ranks:
                    if rank not in answers and (given := read_answer(self._launch.folder, rank, number)):
                        answers[rank] = given
                if len(answers) == len(ranks):
                    self._launch.show_output()
                    break
                self._launch.hangs.woken = [rank for rank in ranks if rank not in answers]
                if self._launch.poll(POLL):
                    stuck = deadline is not None and isinstance(self._launch.error, Deadlock)
                    raise self._deaf(ranks, answers) if stuck else self._explain_end(ranks, answers)
                if deadline is not None and time.monotonic() > deadline:
                    self._launch.end()
                    raise self._deaf(ranks, answers)
            except KeyboardInterrupt:
                if deadline is None:
                    deadline = time.monotonic() + INTERRUPT_TAKES
                for rank in ranks:
                    if rank not in answers and self.pids:
                        os.kill(self.pids[rank], signal.SIGINT)
        if deadline is not None:
            raise KeyboardInterrupt
        return answers

    def _explain_end(self, ranks: list[int], answers: dict[int, Reply]) -> SessionEnded:
        """Return why the session is over; what a rank raised before comes first, since others then waited in vain."""
        error = self._launch.error
        why = str(error) if error is not None else "the ranks were ended"
        if len(ranks) < self.ranks:
            why += f"\n(The cell ran on {spelt(ranks)} of {self.ranks} only.)"
        raised = failure(answers, self.ranks)
        if raised is not None:
            why = f"{raised}\n\nThe other ranks then waited in vain: {why}"
        return SessionEnded(f"{why}\n\n{LOST}")

    def _deaf(self, ranks: list[int], answers: dict[int, Reply]) -> SessionEnded:
        late = spelt([rank for rank in ranks if rank not in answers])
        return SessionEnded(
            f"{late} could not be interrupted: a rank that waits for a peer in C++ code hears nothing. {LOST}"
        )


def _trace_since(rank: RankTrace, first: int | None) -> RankTrace:
    """Return a rank's trace from an op on; none of it for a rank that did not run the cell.

    What it held in memory by then counts as there from the start.
    """
    if first is None or first >= len(rank.ops):
        return RankTrace(rank.ops[:0], rank.memory[:0], rank.names, "finished")
    ops = rank.ops[first:].copy()
    ops["ref"] = [ref - first if ref >= first else -1 for ref in ops["ref"].tolist()]
    memory = rank.memory.copy().astype(MEMORY)
    memory["time"] = memory["time"].clip(min=int(ops["start"][0]))
    memory["op"] = (memory["op"].astype("i8") - first).clip(min=0)
    return RankTrace(ops, memory, rank.names, rank.state, sent_parts=rank.sent_since(first))


# ---- what is asked, and what is answered -------------------------------------------------------------------------


def wake(folder: Path, rank: int, number: int) -> None:
    """Wake a rank for a request."""
    pipe = os.open(part(folder, rank, "requests"), os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(pipe, f"{number}\n".encode())
    finally:
        os.close(pipe)


def read_answer(folder: Path, rank: int, number: int) -> Reply | None:
    """Return a rank's answer and remove its file; None if there is none yet."""
    path = part(folder, rank, f"answer{number}")
    try:
        with path.open("rb") as file:
            given: Reply = pickle.load(file)
    except FileNotFoundError:
        return None
    path.unlink(missing_ok=True)
    return given


class CellFailed(RankFailed):
    """A cell raised on some ranks; those that did not have run it to its end, and all keep their variables."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the ranks' tracebacks, without the frames of the notebook's own process."""
        return str(self).splitlines()


def same(answers: Mapping[int, Reply], key: Any) -> dict[Any, list[int]]:
    """Return the ranks by what is the same in their answers, the first rank's first."""
    ranks: dict[Any, list[int]] = {}
    for rank in sorted(answers):
        ranks.setdefault(key(answers[rank]), []).append(rank)
    return ranks


def show_values(answers: Mapping[int, Reply]) -> None:
    """Display the value of the cell's last expression, once for all ranks where it is the same."""
    from IPython.display import display

    for shown, ranks in same(answers, lambda answer: answer.shown).items():
        if shown:
            label, lines = f"[{spelt(ranks)}]", shown.splitlines()
            text = f"{label} {lines[0]}" if len(lines) == 1 else "\n".join([label, *lines])
            display({"text/plain": visible(text)}, raw=True)  # type: ignore[no-untyped-call]


def failure(answers: Mapping[int, Reply], world_size: int) -> CellFailed | None:
    """Return the error of the ranks that raised, the same one once; None if none of the answers, by rank, is one."""
    failed = {rank: each for rank, each in answers.items() if each.state == "error"}
    if not failed:
        return None
    kind = "traceback" if internals_shown() else "folded"
    by_error = same(failed, lambda answer: answer.error.get(kind) or answer.error["message"])
    parts = []
    for text, ranks in by_error.items():
        error = failed[ranks[0]].error
        said = f"{error['type']}: {error['message']}"
        parts.append(f"{spelt(ranks)} of {world_size}: {said}\n\n{text.rstrip()}")
    first = min(failed)
    return CellFailed("\n\n".join(parts), rank=first, traceback=failed[first].error.get("traceback", ""))
