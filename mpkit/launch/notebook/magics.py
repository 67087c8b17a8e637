"""`%%ranks`: the magics, as `%load_ext mpkit` adds them to IPython, and the ranks that stay between cells.

%%ranks 4          run this cell on every rank of a group of 4, which is started where there is none
%%ranks            run this cell on every rank
%%ranks 0,2        run it on ranks 0 and 2; `2,` is rank 2 alone
%ranks_reset       end the ranks

The variable `ranks` is the group: `ranks["x"]` has a variable's values by rank, and `ranks.timeline()` shows what the
latest cell did.

The group is one long launch whose function takes requests (`on_rank`), so variables persist on each rank. Between cells
nothing watches the launch: ranks sleep, and an idle group is not a hang. While a cell runs, the notebook's own thread
watches it as any run:

    ask         write the request, wake the chosen ranks
    wait        show their output; look for hangs; collect answers
    interrupt   interrupt the cell on the ranks; a rank that goes on for long (in C++ code) is ended, with the session

A session ends, and its variables are gone, when a rank dies or the ranks hang. The next cell starts a new one.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.display import display

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

FIRST = "there are no ranks yet: `%%ranks 4` in the first line of a cell starts 4 and runs the cell on them"
POLL = 0.01  # seconds between two looks for answers
INTERRUPT_TAKES = 3.0  # seconds within which an interrupted cell ends on a rank that runs Python code
LOST = "The ranks were ended, and their variables are gone; the next %%ranks cell starts new ones."


@magics_class
class RankMagics(Magics):
    """`%%ranks` and `%ranks_reset`."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.session: RankSession | None = None
        atexit.register(self.ranks_reset)

    @cell_magic("ranks")  # type: ignore[arg-type]
    @public
    def ranks_cell(self, line: str, cell: str) -> None:
        """Run a cell on ranks; see the module."""
        text, session = line.strip(), self.session
        if session is None or session.has_ended:
            session, text = self._start(text)
        elif text.isdecimal() and int(text) == session.ranks:  # the first cell, run again
            text = ""
        elif text.isdecimal():
            raise UsageError(
                f"there are {session.ranks} ranks already. `%%ranks {text},` with a comma runs a cell on rank {text} "
                f"alone; `%ranks_reset` and `%%ranks {text}` start {text} in their place, without their variables"
            )
        answers = session.run("\n" + cell, ranks_of(text, session.ranks), _name_of_cell(self.shell))
        show_values(answers)
        if failed := failure(answers, session.ranks):
            raise failed

    @line_magic("ranks_reset")  # type: ignore[arg-type]
    @public
    def ranks_reset(self, line: str = "") -> None:
        """End the ranks."""
        if text := line.strip():
            starts = f"%ranks_reset ends the ranks and takes nothing; then %%ranks {text} starts others"
            raise UsageError(starts)
        if self.session is not None:
            self.session.close()
            self.session = None

    def _start(self, text: str) -> tuple[RankSession, str]:
        """Start the ranks that a line asks for, or as many as there were; return them, and the ranks it chooses."""
        if text.isdecimal():
            ranks, text = int(text), ""
        elif self.session is not None:
            ranks = self.session.ranks
            print(f"mpkit: {ranks} new ranks; the variables of the earlier ones are gone")
        else:
            raise UsageError(f"{FIRST}; {text!r} is no number" if text else FIRST)
        self.ranks_reset()
        made = self.session = RankSession(ranks)
        assert self.shell is not None
        variables = self.shell.user_ns
        if isinstance(variables.get("ranks", made), RankSession):  # not a variable of the user's own
            variables["ranks"] = made
        return made, text


def _name_of_cell(shell: Any) -> str:
    """Return what IPython calls the cell that is running, such as "Cell In[3]"."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if label := shell.compile.format_code_name(frame.f_code.co_filename):
            return " ".join(label)
        frame = frame.f_back
    return "Cell"


def ranks_of(text: str, world_size: int) -> list[int]:
    """Return the ranks that a text chooses: numbers with commas between ("2," is rank 2 alone), or all."""
    numbers = [each.strip() for each in text.split(",") if each.strip()]
    for each in numbers:
        if not each.isdecimal():
            raise UsageError(f"%%ranks {text}: what chooses ranks is a line such as 0,2, or none for all")
        if int(each) >= world_size:
            raise UsageError(
                f"there is no rank {each}: this session has ranks 0 to {world_size - 1}; %ranks_reset and %%ranks "
                "start another with more, without the variables of this one"
            )
    return sorted({int(each) for each in numbers}) or [*range(world_size)]


def load(shell: Any) -> None:
    """Add the magics to a shell; `%load_ext mpkit` does."""
    if shell.find_cell_magic("ranks") is None:
        shell.register_magics(RankMagics(shell))


class _WithoutFrames(Exception):
    """IPython shows it without the frames of the notebook's own process."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class SessionEnded(_WithoutFrames, MpkitError):
    """The session has no ranks any more."""


class CellFailed(_WithoutFrames, RankFailed):
    """A cell raised on some ranks; those that did not have run it to its end, and all keep their variables."""


@public
class RankSession:
    """A group of ranks that stays; `cluster` starts it, and for trainings, make another."""

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

    def run(self, code: str, ranks: Sequence[int] | None = None, name: str = "cell") -> dict[int, Reply]:
        """Run code on all ranks or on some, and return their answers by rank. Tracebacks call the cell `name`.

        Interrupted, it raises a KeyboardInterrupt and the ranks keep their variables, or else a SessionEnded.
        """
        answers = self._ask(code, name, list(range(self.ranks) if ranks is None else ranks))
        if any(each.recorded for each in answers.values()):
            self._began = {rank: each.ops for rank, each in answers.items()}
        return answers

    def timeline(self) -> Timeline:
        """Put the latest cell that recorded anything on a clock: what its ranks computed, sent and waited for."""
        trace = self._launch.trace
        ranks = [_trace_since(rank, self._began.get(number)) for number, rank in enumerate(trace.ranks)]
        if not any(len(rank.ops) for rank in ranks):
            records = "comm.all_reduce(...) does, and `with ctx.record.span('name'):`"
            raise MpkitError(f"no cell has recorded anything: {records}")
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
                        asleep = asleep[1:]
                    except OSError:  # nobody reads that pipe: the rank has died between two cells
                        self._launch.poll(POLL)
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
        if (raised := failure(answers, self.ranks)) is not None:
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
        reply: Reply = pickle.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    path.unlink(missing_ok=True)
    return reply


def same(answers: Mapping[int, Reply], key: Any) -> dict[Any, list[int]]:
    """Group the ranks by what is the same in their answers, in the order of the ranks."""
    ranks: dict[Any, list[int]] = {}
    for rank in sorted(answers):
        ranks.setdefault(key(answers[rank]), []).append(rank)
    return ranks


def show_values(answers: Mapping[int, Reply]) -> None:
    """Display the value of the cell's last expression, once for all ranks where it is the same."""
    for shown, ranks in same(answers, lambda answer: answer.shown).items():
        if shown:
            label, lines = f"[{spelt(ranks)}]", shown.splitlines()
            text = f"{label} {lines[0]}" if len(lines) == 1 else "\n".join([label, *lines])
            display({"text/plain": visible(text)}, raw=True)  # type: ignore[no-untyped-call]


def failure(answers: Mapping[int, Reply], world_size: int) -> CellFailed | None:
    """Return the error of the ranks that raised, the same one once; None if no answer is an error."""
    if not (failed := {rank: each for rank, each in answers.items() if each.state == "error"}):
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
