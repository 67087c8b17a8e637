"""Ranks for a check: with seeded delays, limits on time and memory, and no hang that is not explained.

On a rank:

    limit     memory
    delay     before each communication, drawn from the case's seed: who relies on luck is found out
    play      the exercise's own function, with the answer and the case

The answer comes as bytes and is unpacked on ranks only: what it does, it does there. What it returns comes back as
plain data (`mpkit.classroom.sealed`).
"""

from __future__ import annotations

import functools
import pickle
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle

from mpkit.classroom.exercise import Case
from mpkit.classroom.sealed import sealed, unsealed
from mpkit.classroom.seen import Seen
from mpkit.cluster import Cluster
from mpkit.errors import CommMismatch, Deadlock, RankFailed

if TYPE_CHECKING:
    from mpkit.launch.context import Context

__all__ = ["Answer", "Limits", "Room", "limit_memory", "shared_room"]

Play = Callable[["Context", Any, Case], Any]
"""What happens on a rank: takes its context, the answer and the case, and returns what is checked."""


@dataclass(frozen=True)
class Answer:
    """What a student handed in, by value.

    Attributes:
        packed: by cloudpickle.
        name: of the function or class; what it is, of other values.
    """

    packed: bytes
    name: str

    @classmethod
    def of(cls, value: Any) -> Answer:
        """Pack it.

        Raises:
            ValueError: it holds something that cannot go to another process.
        """
        name = getattr(value, "__name__", type(value).__name__)
        try:
            return cls(cloudpickle.dumps(value), name)
        except Exception as error:
            raise ValueError(
                f"{name} uses something that cannot be sent to ranks ({type(error).__name__}: {error}). Make such "
                "things (files, locks, clusters, running generators) inside of the function that uses them."
            ) from None


@dataclass(frozen=True)
class Limits:
    """What one case may take.

    Attributes:
        seconds: of wall time; then the ranks are told to stop, and to say where they are.
        memory: bytes that a rank may come to hold.
        grace: seconds without any rank moving, while all wait, that make a hang.
        delay: seconds, the longest before a communication.
    """

    seconds: float = 8.0
    memory: int = 2 * 2**30
    grace: float = 1.5
    delay: float = 0.004


class Room:
    """Ranks to try answers on.

    Args:
        cluster: whose helper process to use; None: one of its own.
        limits: of each case.
    """

    def __init__(self, cluster: Cluster | None = None, limits: Limits | None = None) -> None:
        self._own = cluster is None
        self._cluster = cluster if cluster is not None else Cluster(ranks=1, device="cpu")
        self.limits = limits if limits is not None else Limits()

    def cluster(self, ranks: int) -> Cluster:
        """A cluster of so many ranks, from the one helper process."""
        if self._own and self._cluster.warm_pid is None:  # an answer has ended it
            self._cluster.close()
            self._cluster = Cluster(ranks=1, device="cpu")
        return self._cluster.resized(ranks)

    @property
    def pids(self) -> set[int]:
        """Of the helper process; empty if there is none now."""
        pid = self._cluster.warm_pid
        return {pid} if pid is not None else set()

    def close(self) -> None:
        """End the helper process."""
        self._cluster.close()

    def play(self, play: Play, answer: Answer, case: Case) -> Seen:
        """Run the answer on the case's ranks.

        Args:
            play: runs on every rank, with its context, the answer and the case.
        """
        printed: list[str] = []
        launch = self.cluster(case.ranks).launch(
            on_rank, (play, answer.packed, case, self.limits), sink=printed.append, grace=self.limits.grace
        )
        launch.poll(0.0)  # starts the ranks, once torch is imported
        deadline = time.monotonic() + self.limits.seconds
        try:
            while not launch.poll(0.1):
                if time.monotonic() > deadline and launch.error is None:
                    launch.give_up()
        except BaseException:
            launch.kill()
            launch.finish()
            raise
        found: dict[str, Any] = {"case": case, "trace": launch.trace, "printed": printed}
        try:
            return Seen(got=launch.results(unsealed), **found)
        except Deadlock as error:
            return Seen(hang=re.sub(r"\n\(A step that is only slow.*", "", str(error)), **found)
        except CommMismatch as error:
            return Seen(error=str(error), mismatch=str(error), **found)
        except RankFailed as error:
            return Seen(**{**found, **_said(error)})
        except (pickle.UnpicklingError, OSError, EOFError, RuntimeError, ValueError, TypeError) as error:
            return Seen(error=f"its result cannot be read: {type(error).__name__}: {error}", **found)


def on_rank(ctx: Context, play: Play, packed: bytes, case: Case, limits: Limits) -> Any:
    """What each rank does."""
    # ---- limit
    limit_memory(limits.memory)
    # ---- delay
    if limits.delay:
        ctx.comm.delays(_delays(case, ctx.rank, limits.delay))
    # ---- play
    return sealed(play(ctx, pickle.loads(packed), case))


def limit_memory(more: int) -> None:
    """Allow this process so many bytes of data besides what it has; where the system can."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[5])  # data and stack, as RLIMIT_DATA counts them
    except (ImportError, OSError):  # not Linux
        return
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _delays(case: Case, rank: int, longest: float) -> Callable[[], None]:
    """Sleeps, most of them short: each rank is late now and then, each in its own way."""
    import random

    draw = random.Random(f"{case.seed} {case.ranks} {rank}")
    return lambda: time.sleep(longest * draw.random() ** 3)


def _said(error: RankFailed) -> dict[str, str]:
    """The error in one line, and the last line of the student's own code that led to it."""
    if not error.traceback:
        return {"error": str(error)}
    last = [
        line for line in error.traceback.rstrip().splitlines() if line and not line.startswith((" ", "|"))
    ][-1]
    places = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n(?:    (?! *File)(.*)\n)?', error.traceback)
    own = [
        place for place in places if not re.search(r"[/\\](mpkit|torch|lib[/\\]python[\d.]+)[/\\]", place[0])
    ]
    where = ""
    if own:
        _, line, function, text = own[-1]
        where = f"line {line} of the cell, in {function}" + (f": {text.strip()}" if text else "")
    return {"error": f"rank {error.rank}: {last}", "where": where}


@functools.cache
def shared_room() -> Room:
    """The room of who asked for none: its helper process stays warm from check to check, until Python ends."""
    return Room()
