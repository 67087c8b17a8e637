"""The magics, as `%load_ext mpkit` adds them to IPython.

%%ranks 4          run this cell on every rank of a group of 4, which is started where there is none
%%ranks            run this cell on every rank
%%ranks 0,2        run it on ranks 0 and 2; `2,` is rank 2 alone
%ranks_reset       end the ranks

The variable `ranks` is the group: `ranks["x"]` has a variable's values by rank, and `ranks.timeline()` shows what the
latest cell did.
"""

from __future__ import annotations

import atexit
import sys
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from mpkit.common.tracebacks import public
from mpkit.launch.notebook.session import RankSession, failure, show_values

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
        try:
            chosen = ranks_of(text, session.ranks)
        except ValueError as error:
            raise UsageError(str(error)) from None
        answers = session.run("\n" + cell, chosen, name=_name_of_cell(self.shell))
        show_values(answers)
        if failed := failure(answers, session.ranks):
            raise failed

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

    def _start(self, text: str) -> tuple[RankSession, str]:
        """Start the ranks that a line asks for, or as many as there were; return them, and the ranks it chooses."""
        before = self.session
        if before is None and not text.isdecimal():
            raise UsageError(FIRST if not text else f"{FIRST}; {text!r} is no number")
        self.ranks_reset()
        if text.isdecimal():
            made, text = RankSession(int(text)), ""
        else:
            assert before is not None
            print(f"mpkit: {before.ranks} new ranks; the variables of the earlier ones are gone")
            made = RankSession(before.ranks)
        assert self.shell is not None
        if isinstance(
            self.shell.user_ns.setdefault("ranks", made), RankSession
        ):  # and no variable of the user's own
            self.shell.user_ns["ranks"] = made
        self.session = made
        return made, text


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
    """Return the ranks that a text chooses: numbers with commas between, or all.

    >>> ranks_of("0,2", 4), ranks_of("2,", 4), ranks_of("", 2)
    ([0, 2], [2], [0, 1])

    Raises:
        ValueError: there is no such rank.
    """
    numbers = [each.strip() for each in text.split(",") if each.strip()]
    for each in numbers:
        if not each.isdecimal():
            raise ValueError(f"%%ranks {text}: what chooses ranks is a line such as 0,2, or none for all")
        if int(each) >= world_size:
            raise ValueError(
                f"there is no rank {each}: this session has ranks 0 to {world_size - 1}; %ranks_reset and %%ranks "
                "start another with more, without the variables of this one"
            )
    return sorted({int(each) for each in numbers}) or [*range(world_size)]


def load(shell: Any) -> None:
    """Add the magics to a shell; `%load_ext mpkit` does."""
    if shell.find_cell_magic("ranks") is None:
        shell.register_magics(RankMagics(shell))
