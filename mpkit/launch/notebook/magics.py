"""The magics, as `%load_ext mpkit` adds them to IPython.

%%ranks 4          run this cell on every rank of a group of 4, which is started where there is none
%%ranks            run this cell on every rank
%%ranks 0,2        run it on ranks 0 and 2; `2,` is rank 2 alone, `1:` all but rank 0
%ranks 0,2         let cells run on these ranks from here on; `%ranks all`
%ranks x.shape     run one line
%ranks             show the ranks; `%ranks --timeline`: what the latest cell did
%ranks_get x       return a variable's values by rank, as `ranks["x"]` does; `ranks["x"] = 3` sets one
%ranks_reset 2     end the ranks, and start others if there is a number
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
from mpkit.launch.notebook.session import CellFailed, RankSession, failure, show_values, spelt

__all__ = ["RankMagics", "is_selection", "load", "ranks_of"]

OPTION = re.compile(r"--(timeline|\w+)(?:(?<!timeline)[=\s]+([^\s-]\S*))?")
FIRST = "there are no ranks yet: `%%ranks 4` in the first line of a cell starts 4 and runs the cell on them"


@magics_class
class RankMagics(Magics):
    """`%%ranks` and what belongs to it.

    Args:
        shell: IPython's shell.
    """

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.session: RankSession | None = None
        self._chosen, self._device = "all", "auto"
        atexit.register(self._close)

    # ---- the magics ---------------------------------------------------------------------------------------

    @cell_magic("ranks")  # type: ignore[arg-type]
    @public
    def ranks_cell(self, line: str, cell: str) -> None:
        """Run a cell on ranks; see the module."""
        text, options = _parse_line(line)
        session, chosen = self._choose(text, options)
        self._run(session, chosen, "\n" + cell, options)

    @line_magic("ranks")  # type: ignore[arg-type]
    @public
    def ranks_line(self, line: str) -> Any:
        """Choose ranks, show them, or run one line on them; see the module."""
        text, options = line.strip(), dict[str, str]()
        if line.lstrip().startswith("--") or is_selection(line.partition("--")[0]):  # not Python code
            text, options = _parse_line(line)
        if "timeline" in options:
            return self._require_session().timeline()
        if not text:
            print(self._describe_session())
            return None
        if text == "all":
            self._chosen = text
            print("cells run on all ranks from here on")
            return None
        if text.isdecimal() or is_selection(text):
            _, chosen = self._choose(text, options)
            self._chosen = ",".join(map(str, chosen)) + ","
            print(f"cells run on {spelt(chosen)} from here on (%ranks all: on all)")
            return None
        session, chosen = self._choose("", options)
        self._run(session, chosen, text, options)
        return None

    @line_magic("ranks_get")  # type: ignore[arg-type]
    @public
    def ranks_get(self, line: str) -> list[Any]:
        """Return the values of a variable by rank."""
        if not line.strip():
            raise UsageError("%ranks_get takes the name of a variable: %ranks_get x")
        return self._require_session()[line.strip()]

    @line_magic("ranks_reset")  # type: ignore[arg-type]
    @public
    def ranks_reset(self, line: str) -> None:
        """End the ranks; start others if there is a number."""
        text, options = _parse_line(line)
        if text and not text.isdecimal():
            raise UsageError(f"%ranks_reset takes a number of ranks, not {text!r}: %ranks_reset 4")
        self._close()
        if text:
            self._start(int(text), options)
            print(self._describe_session())

    # ---- how ----------------------------------------------------------------------------------------------

    def _choose(self, text: str, options: dict[str, str]) -> tuple[RankSession, list[int]]:
        """Return the session and the ranks that a line chooses; start ranks if there are none."""
        session = self.session
        if session is None or session.has_ended:
            if not text.isdecimal() and session is not None:
                print(f"mpkit: {session.ranks} new ranks; the variables of the earlier ones are gone")
                number = session.ranks
            elif not text.isdecimal():
                raise UsageError(FIRST if not text else f"{FIRST}; {text!r} is no number")
            else:
                number, text = int(text), ""
            session = self._start(number, {"device": self._device} | options)
            return session, ranks_of(text or "all", number)
        if text.isdecimal() and int(text) == session.ranks:  # the first cell, run again
            return session, list(range(session.ranks))
        if text.isdecimal():
            raise UsageError(
                f"there are {session.ranks} ranks already. `%%ranks {text},` with a comma runs a cell on rank {text} "
                f"alone; `%ranks_reset {text}` starts {text} in their place, without their variables"
            )
        if text and not is_selection(text):
            raise UsageError(f"%%ranks {text}: what chooses ranks is a line such as 0,2 or 1: or all")
        try:
            return session, ranks_of(text or self._chosen, session.ranks)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def _start(self, ranks: int, options: dict[str, str]) -> RankSession:
        self._close()
        self._device = options.get("device", "auto")
        self.session = RankSession(ranks, self._device)
        self._chosen = "all"
        assert self.shell is not None
        names = self.shell.user_ns
        if not isinstance(names.get("ranks"), (RankSession, type(None))):
            print(
                "mpkit: `ranks` is a variable of yours, which stays; %ranks_get and %ranks --timeline do as much"
            )
        else:
            names["ranks"] = self.session
        return self.session

    def _run(self, session: RankSession, chosen: list[int], code: str, options: dict[str, str]) -> None:
        name = _name_of_cell(self.shell)
        try:
            ast.parse(code, name)
        except SyntaxError as error:
            raise CellFailed("".join(traceback.format_exception_only(error))) from None
        timeout = float(options["timeout"]) if "timeout" in options else None
        answers = session.run(code, chosen, name=name, timeout=timeout)
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

    def _require_session(self) -> RankSession:
        if self.session is None:
            raise UsageError(FIRST)
        return self.session

    def _describe_session(self) -> str:
        if self.session is None or self.session.has_ended:
            return FIRST
        chosen = ranks_of(self._chosen, self.session.ranks)
        where = "" if len(chosen) == self.session.ranks else f"; cells run on {spelt(chosen)}"
        return f"{self.session!r}{where}"

    def _close(self) -> None:
        if self.session is not None:
            self.session.close()
            self.session = None


def _parse_line(line: str) -> tuple[str, dict[str, str]]:
    """Return the text of a line and its options.

    >>> _parse_line("0,2 --timeout 5")
    ('0,2', {'timeout': '5'})

    Raises:
        UsageError: there is no such option, or it has no value.
    """
    options = {name: value for name, value in OPTION.findall(line)}
    for name, value in options.items():
        if name not in ("device", "timeout", "timeline"):
            raise UsageError(f"--{name}: there are --device cpu, --timeout 60 (seconds) and --timeline")
        if name == "timeout" and not re.fullmatch(r"\d+(\.\d+)?", value):
            raise UsageError(f"--timeout {value}: a number of seconds is wanted")
        if name == "device" and not value:
            raise UsageError("--device cpu or --device cuda")
    return OPTION.sub("", line).strip(), options


def _name_of_cell(shell: Any) -> str:
    """Return what IPython calls the cell that is running, such as "Cell In[3]"."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        label = shell.compile.format_code_name(frame.f_code.co_filename)
        if label:
            return " ".join(label)
        frame = frame.f_back
    return "Cell"


# ---- which ranks -------------------------------------------------------------------------------------------------

PART = re.compile(r"(-?\d+)?(:(-?\d+)?)?")


def is_selection(text: str) -> bool:
    """Return whether a text is meant to choose ranks.

    >>> [is_selection(text) for text in ("0,2", "1:", "all", "2,", "x + 1", "")]
    [True, True, True, True, False, False]
    """
    text = text.strip()
    return text == "all" or bool(text and re.fullmatch(r"[-\d:,\s]+", text))


def ranks_of(text: str, world_size: int) -> list[int]:
    """Return the ranks that a text chooses: numbers and ranges as in Python, "all", or a number and a comma.

    >>> ranks_of("0,2", 4), ranks_of("1:", 4), ranks_of("2,", 4), ranks_of("-1", 4), ranks_of("all", 2)
    ([0, 2], [1, 2, 3], [2], [3], [0, 1])

    Raises:
        ValueError: there is no such rank.
    """
    if text.strip() == "all":
        return list(range(world_size))
    chosen: set[int] = set()
    for one in filter(None, re.split(r"[,\s]+", text.strip())):
        if not PART.fullmatch(one):
            raise ValueError(f"{one!r} chooses no ranks: 0,2 and 1:3 and all do")
        if ":" in one:
            start, _, stop = one.partition(":")
            chosen.update(
                range(world_size)[slice(int(start) if start else None, int(stop) if stop else None)]
            )
            continue
        number = int(one)
        if not -world_size <= number < world_size:
            raise ValueError(
                f"there is no rank {number}: this session has ranks 0 to {world_size - 1}; `%ranks_reset {number + 1}` "
                "starts another with more, without the variables of this one"
            )
        chosen.add(number % world_size)
    if not chosen:
        raise ValueError(f"{text.strip()!r} chooses no ranks of {world_size}: 0,2 and 1:3 and all do")
    return sorted(chosen)


def load(shell: Any) -> None:
    """Add the magics to a shell; `%load_ext mpkit` does."""
    if shell.find_cell_magic("ranks") is None:
        shell.register_magics(RankMagics(shell))
