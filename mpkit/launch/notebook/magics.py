"""The magics, as `%load_ext mpkit` adds them to IPython.

%%ranks 4          run this cell on every rank of a group of 4, which is started where there is none
%%ranks 4 cpu      the same, on CPU processes; "auto", as in `mk.Cluster`, where no device is named
%%ranks            run this cell on every rank
%%ranks 0,2        run it on ranks 0 and 2; `2,` is rank 2 alone, `1:` all but rank 0
%ranks_reset       end the ranks

The variable `ranks` is the group: `ranks["x"]` has a variable's values by rank, `ranks["x"] = 3` sets one, and
`ranks.timeline()` shows what the latest cell did.
"""

from __future__ import annotations

import ast
import atexit
import re
import sys
import traceback
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from mpkit.common.tracebacks import public
from mpkit.launch.notebook.session import CellFailed, RankSession, failure, show_values

__all__ = ["RankMagics", "load", "ranks_of"]

FIRST = "there are no ranks yet: `%%ranks 4` in the first line of a cell starts 4 and runs the cell on them"


@magics_class
class RankMagics(Magics):
    """`%%ranks` and `%ranks_reset`.

    Args:
        shell: IPython's shell.
    """

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.session: RankSession | None = None
        atexit.register(self.ranks_reset)

    @cell_magic("ranks")  # type: ignore[arg-type]
    @public
    def ranks_cell(self, line: str, cell: str) -> None:
        """Run a cell on ranks; see the module."""
        text, device = re.fullmatch(r"\s*(.*?)\s*(cpu|cuda|auto|)\s*", line).groups()  # type: ignore[union-attr]
        session = self.session
        if session is None or session.has_ended:
            session, text = self._start(text, device)
        elif text.isdecimal() and int(text) == session.ranks:  # the first cell, run again
            text = "all"
        elif text.isdecimal():
            raise UsageError(
                f"there are {session.ranks} ranks already. `%%ranks {text},` with a comma runs a cell on rank {text} "
                f"alone; `%ranks_reset` and `%%ranks {text}` start {text} in their place, without their variables"
            )
        try:
            chosen = ranks_of(text or "all", session.ranks)
        except ValueError as error:
            raise UsageError(str(error)) from None
        self._run(session, chosen, "\n" + cell)

    @line_magic("ranks_reset")  # type: ignore[arg-type]
    @public
    def ranks_reset(self, line: str = "") -> None:
        """End the ranks."""
        if line.strip():
            raise UsageError(
                f"%ranks_reset ends the ranks and takes nothing; then %%ranks {line.strip()} starts others"
            )
        if self.session is not None:
            self.session.close()
            self.session = None

    def _start(self, text: str, device: str) -> tuple[RankSession, str]:
        """Start the ranks that a line asks for, or as many as there were; return them, and the ranks it chooses."""
        before = self.session
        if before is None and not text.isdecimal():
            raise UsageError(FIRST if not text else f"{FIRST}; {text!r} is no number")
        self.ranks_reset()
        if text.isdecimal():
            self.session, chosen = RankSession(int(text), device or "auto"), "all"
        else:
            assert before is not None
            print(f"mpkit: {before.ranks} new ranks; the variables of the earlier ones are gone")
            self.session, chosen = RankSession(before.ranks, device or before.device), text
        assert self.shell is not None
        names = self.shell.user_ns
        if isinstance(names.get("ranks"), (RankSession, type(None))):
            names["ranks"] = self.session
        else:
            print(
                'mpkit: `ranks` is a variable of yours, which stays; without it, ranks["x"] would have values by rank'
            )
        return self.session, chosen

    def _run(self, session: RankSession, chosen: list[int], code: str) -> None:
        name = _name_of_cell(self.shell)
        try:
            ast.parse(code, name)
        except SyntaxError as error:
            raise CellFailed("".join(traceback.format_exception_only(error))) from None
        answers = session.run(code, chosen, name=name)
        show_values(answers)
        calls = {rank: each.calls for rank, each in answers.items()}
        note = ""
        if len(set(calls.values())) > 1:
            fewest, most = (pick(calls, key=calls.__getitem__) for pick in (min, max))
            note = (
                f"rank {most} has made {calls[most]} collective calls and rank {fewest} {calls[fewest]}: the next "
                "one will not match. %ranks_reset and %%ranks start again."
            )
        failed = failure(answers, session.ranks, note)
        if failed is not None:
            raise failed
        if note:
            print(f"mpkit: {note}")


def _name_of_cell(shell: Any) -> str:
    """Return what IPython calls the cell that is running, such as "Cell In[3]"."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        label = shell.compile.format_code_name(frame.f_code.co_filename)
        if label:
            return " ".join(label)
        frame = frame.f_back
    return "Cell"


def ranks_of(text: str, world_size: int) -> list[int]:
    """Return the ranks that a text chooses: numbers and ranges as in Python, "all", or a number and a comma.

    >>> ranks_of("0,2", 4), ranks_of("1:", 4), ranks_of("2,", 4), ranks_of("-1,", 4), ranks_of("all", 2)
    ([0, 2], [1, 2, 3], [2], [3], [0, 1])

    Raises:
        ValueError: there is no such rank.
    """
    every = range(world_size)
    if text == "all":
        return [*every]
    chosen: set[int] = set()
    for one in filter(None, re.split(r"[,\s]+", text)):
        if not (match := re.fullmatch(r"(-?\d+)?(:(-?\d+)?)?", one)):
            raise ValueError(f"%%ranks {text}: what chooses ranks is a line such as 0,2 or 1: or all")
        start, colon, stop = match.groups()
        if colon:
            chosen.update(every[slice(int(start) if start else None, int(stop) if stop else None)])
        elif not -world_size <= int(start) < world_size:
            raise ValueError(
                f"there is no rank {start}: this session has ranks 0 to {world_size - 1}; %ranks_reset and %%ranks "
                "start another with more, without the variables of this one"
            )
        else:
            chosen.add(int(start) % world_size)
    if not chosen:
        raise ValueError(f"{text!r} chooses no ranks of {world_size}: 0,2 and 1:3 and all do")
    return sorted(chosen)


def load(shell: Any) -> None:
    """Add the magics to a shell; `%load_ext mpkit` does."""
    if shell.find_cell_magic("ranks") is None:
        shell.register_magics(RankMagics(shell))
