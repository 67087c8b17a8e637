"""RankSession: ranks that stay, and run one cell after another; variables persist on each rank.

It is one long launch whose function takes requests (`request_loop`). Between cells nobody looks at the launch: ranks
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
from collections.abc import Sequence
from typing import Any

from mpkit.common.tracebacks import public
from mpkit.errors import Deadlock, MpkitError
from mpkit.launch.launch import Launch
from mpkit.launch.notebook.exchange import Reply, Request, read_answer, wake, write_request
from mpkit.launch.notebook.request_loop import serve
from mpkit.launch.notebook.selection import spelt
from mpkit.launch.session.cluster import Cluster
from mpkit.timeline.timeline import Timeline
from mpkit.trace import MEMORY, RankTrace, Trace

__all__ = ["RankSession", "SessionEnded"]

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

    Args:
        ranks, device: as in `Cluster`.

    Attributes:
        cluster: the cluster; for trainings, make another.
        ranks: the number of ranks.
    """

    def __init__(self, ranks: int, device: str = "auto") -> None:
        self.cluster = Cluster(ranks, device)
        self.ranks = ranks
        self._number = 0
        self._began: dict[
            int, int
        ] = {}  # by rank, the ops that its trace had before the latest cell that added some
        launch = self.cluster.launch(serve, (), sink=print)
        assert isinstance(launch, Launch)  # these ranks are started here, by no launcher
        self._launch = launch
        try:
            self._wait(list(range(ranks)), 0, None)
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

    def run(
        self,
        code: str,
        ranks: Sequence[int] | None = None,
        *,
        name: str = "cell",
        timeout: float | None = None,
    ) -> dict[int, Reply]:
        """Run code on some ranks, by default on all, and return their answers by rank.

        Args:
            code: Python code.
            ranks: the ranks.
            name: what tracebacks call the cell.
            timeout: as in `Cluster.run`.

        Raises:
            SessionEnded: a rank died, the ranks hang, or could not be interrupted.
            KeyboardInterrupt: the cell was interrupted; the ranks keep their variables.
        """
        chosen = list(range(self.ranks)) if ranks is None else list(ranks)
        answers = self._ask(Request("cell", code, name), chosen, timeout=timeout)
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

    # ---- variables ----------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> list[Any]:
        """Return the value of a variable, or of an expression, by rank; tensors on the CPU.

        Raises:
            NameError: a rank has no such variable.
        """
        answers = self._ask(Request("get", name), list(range(self.ranks)))
        for rank, each in answers.items():
            if each.state == "error":
                kind = NameError if each.error["type"] == "NameError" else MpkitError
                raise kind(f"ranks[{name!r}]: on rank {rank}, {each.error['type']}: {each.error['message']}")
        return [pickle.loads(answers[rank].value) for rank in range(self.ranks)]

    def __setitem__(self, name: str, value: Any) -> None:
        """Give every rank a variable of this value."""
        if not name.isidentifier():
            raise ValueError(f"ranks[{name!r}] = ...: a variable has a name such as 'x'")
        from mpkit.strategies.packing.packing import dumps

        self._ask(Request("put", name, value=dumps(value)), list(range(self.ranks)))

    def complete(self, text: str) -> list[str]:
        """Return what a text can be completed to on rank 0."""
        found: list[str] = self._ask(Request("complete", text), [0])[0].value or []
        return found

    # ---- requests -----------------------------------------------------------------------------------------

    def _ask(self, request: Request, ranks: list[int], *, timeout: float | None = None) -> dict[int, Reply]:
        if self.has_ended:
            raise SessionEnded("these ranks are gone; the next %%ranks cell starts new ones")
        self._number += 1
        write_request(self._launch.folder, self._number, request)
        return self._wait(ranks, self._number, timeout, list(ranks))

    def _wait(
        self, ranks: list[int], number: int, timeout: float | None, asleep: Sequence[int] = ()
    ) -> dict[int, Reply]:
        """Wake those that are asleep, and return the answers of all; an interrupt at any moment is passed on."""
        answers: dict[int, Reply] = {}
        deadline: float | None = None  # once interrupted
        began = time.monotonic()
        while True:
            try:
                while asleep:
                    wake(self._launch.folder, asleep[0], number)
                    asleep = asleep[1:]
                self._collect(ranks, number, answers)
                if len(answers) == len(ranks):
                    self._launch.show_output()
                    break
                if self._launch.poll(POLL):
                    stuck = deadline is not None and isinstance(self._launch.error, Deadlock)
                    raise self._gave_up(ranks, answers, None) if stuck else self._explain_end(ranks, answers)
                late = timeout is not None and time.monotonic() - began > timeout
                if late or (deadline is not None and time.monotonic() > deadline):
                    self._launch.end()
                    raise self._gave_up(ranks, answers, timeout if deadline is None else None)
            except KeyboardInterrupt:
                if deadline is None:
                    deadline = time.monotonic() + INTERRUPT_TAKES
                self._interrupt(rank for rank in ranks if rank not in answers)
        if deadline is not None:
            raise KeyboardInterrupt
        return answers

    def _collect(self, ranks: list[int], number: int, answers: dict[int, Reply]) -> None:
        for rank in ranks:
            if rank not in answers:
                given = read_answer(self._launch.folder, rank, number)
                if given is not None:
                    answers[rank] = given

    def _interrupt(self, ranks: Any) -> None:
        for rank in ranks:
            if self.pids:
                os.kill(self.pids[rank], signal.SIGINT)

    def _explain_end(self, ranks: list[int], answers: dict[int, Reply]) -> Exception:
        """Return why the session is over; what a rank raised before comes first, since others then waited in vain."""
        from mpkit.launch.notebook.replies import failure

        error = self._launch.error
        why = str(error) if error is not None else "the ranks were ended"
        if len(ranks) < self.ranks:
            why += f"\n(The cell ran on {spelt(ranks)} of {self.ranks} only.)"
        raised = failure(answers, self.ranks)
        if raised is not None:
            return SessionEnded(f"{raised}\n\nThe other ranks then waited in vain: {why}\n\n{LOST}")
        return SessionEnded(f"{why}\n\n{LOST}")

    def _gave_up(self, ranks: list[int], answers: dict[int, Reply], timeout: float | None) -> Exception:
        late = spelt([rank for rank in ranks if rank not in answers])
        if timeout is not None:
            return SessionEnded(f"{late} did not finish the cell within {timeout:g} s. {LOST}")
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
