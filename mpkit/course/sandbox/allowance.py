"""How long ranks may take for a case, and what it means if they take longer: that they hang, or that nobody can tell.

begin    nothing counts before the first line of the answer: processes start, modules are imported
count    from there on the time that the machine let the ranks run (`FairClock`)
hangs    they had their time, and are not done; or nothing has moved for a while that they had the machine for
busy     so much time has gone by that nobody waits longer, and the ranks had little of it: that says nothing of
         the answer
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpkit.common.launch_folder import part
from mpkit.errors import MpkitError

if TYPE_CHECKING:
    from mpkit.launch.launch import Launch


HANGS, BUSY = "hangs", "busy"

STILL = 2.0
"""Seconds of the ranks' own time without any progress after which ranks count as hung if nobody waits longer: all that
an answer computes between two communications takes some milliseconds."""


BEGAN = "began"
"""The file of a rank that marks that it has come to the answer's first line."""


@dataclass(frozen=True)
class Limits:
    """Limits on one case.

    Attributes:
        seconds: time after the answer's first line in which the ranks have to end; else they report where they are.
            What they queue for a core does not count (`FairClock`).
        patience: seconds on the wall's clock after which a case ends without a verdict (`Allowance`).
        memory: bytes that a rank may allocate in addition to what it has at the start.
        delay: the longest delay before a communication, in seconds.
    """

    seconds: float = 8.0
    patience: float = 240.0
    memory: int = 2 * 2**30
    delay: float = 0.004


class TooBusy(MpkitError):
    """The machine is too busy to say whether an answer is right."""


@dataclass
class Allowance:
    """Decides, look after look, whether ranks may go on.

    >>> allowance = Allowance(seconds=8.0, patience=300.0)
    >>> allowance.look(wall=20.0, fair=9.0, began=False, moved=True)
    ''
    >>> allowance.look(wall=30.0, fair=9.5, began=True, moved=True)
    ''
    >>> allowance.look(wall=50.0, fair=17.6, began=True, moved=True)
    'hangs'

    Args:
        seconds: the time that ranks may have, from the first line of the answer.
        patience: the seconds after which nobody waits longer, on the wall's clock.
    """

    seconds: float
    patience: float
    _began_at: float | None = None  # on the fair clock, as is the next
    _moved_at: float = 0.0

    def look(self, wall: float, fair: float, began: bool, moved: bool) -> str:
        """Return "" if the ranks may go on, or one of HANGS and BUSY.

        Args:
            wall: the seconds since the ranks were asked for.
            fair: those of them that the machine gave to the ranks.
            began: whether the first line of the answer has been reached.
            moved: whether some rank has made progress since the last look.
        """
        if began and self._began_at is None:
            self._began_at = self._moved_at = fair
        if moved:
            self._moved_at = fair
        if self._began_at is not None and fair - self._began_at > self.seconds:
            return HANGS
        if wall <= self.patience:
            return ""
        return HANGS if self._began_at is not None and fair - self._moved_at > STILL else BUSY


def run_within(launch: Launch, limits: Limits) -> None:
    """Let ranks run to their end, or to that of their time.

    Raises:
        TooBusy: the machine did not let them run.
    """
    from mpkit.course.sandbox.fair_clock import FairClock

    try:
        while not launch.pids and not launch.poll(0.1):  # ranks start once torch is imported
            pass
        clock, allowance, begun = FairClock(), Allowance(limits.seconds, limits.patience), time.monotonic()
        why = ""
        while not launch.poll(0.1):
            began = any(part(launch.folder, rank, BEGAN).exists() for rank in range(launch.ranks))
            wall, fair = time.monotonic() - begun, clock.look(launch.pids)
            why = why or allowance.look(wall, fair, began, launch.hangs.has_moved)
            if why == HANGS and launch.error is None:
                launch.give_up()
            elif why == BUSY:
                launch.kill()
    except BaseException:
        launch.kill()
        launch.finish()
        raise
    if why == BUSY:
        raise TooBusy(
            f"this machine is too busy to judge an answer: after {limits.patience:g} s the ranks have had little of it"
        )
