"""Where answers are tried: on ranks, or in this process where there is no torch, such as in a browser."""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import traceback
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mpkit.common.missing_packages import needs_torch
from mpkit.course.framework.exercise import Case
from mpkit.course.framework.observation import Seen
from mpkit.course.framework.result_data import plain
from mpkit.course.framework.room import PackedAnswer, Play, Room, error_and_line
from mpkit.course.sandbox.allowance import Limits

if TYPE_CHECKING:
    from mpkit.launch.session.cluster import Cluster

__all__ = ["LocalTrials", "shared_room"]


class LocalTrials(Room):
    """In place of ranks this process, where there is no torch: for answers that one rank runs, and that need no torch.

    Nothing limits an answer's time and memory here, and nothing is recorded.
    """

    has_ranks = False

    def __init__(self) -> None:
        self.limits = Limits()

    @property
    def pids(self) -> set[int]:
        """No process."""
        return set()

    def cluster(self, ranks: int) -> Cluster:
        """Raise `NeedsTorch`."""
        raise needs_torch(f"an exercise that runs on {ranks} rank{'s' * (ranks > 1)}")

    def close(self) -> None:
        """End nothing."""

    def play(self, play: Play, answer: PackedAnswer, case: Case) -> Seen:
        """Run the answer in this process, as the only rank."""
        if case.ranks > 1:
            self.cluster(case.ranks)
        printed = io.StringIO()
        outcome: dict[str, Any] = {}
        with contextlib.redirect_stdout(printed):
            try:
                outcome["got"] = [plain(play(None, pickle.loads(answer.packed), case))]
            except Exception as error:  # whatever the student's code raises
                outcome.update(error_and_line("", "".join(traceback.format_exception(error))))
        return Seen(case=case, printed=printed.getvalue().splitlines(), **outcome)


@functools.cache
def shared_room() -> Room:
    """Return the default room; its helper process stays warm from check to check, until Python ends."""
    return Room() if find_spec("torch") is not None else LocalTrials()
