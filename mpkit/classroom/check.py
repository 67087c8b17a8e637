"""mk.check and mk.progress, the functions that students call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpkit.api.cluster import Cluster
from mpkit.classroom.catalogue import families, find, of_family
from mpkit.classroom.framework.room import Answer, Room, shared_room
from mpkit.classroom.judge import Checked, judge
from mpkit.classroom.overview import Overview
from mpkit.classroom.progress import Progress

__all__ = ["check", "progress"]


def check(name: str, answer: Any, *, cluster: Cluster | None = None) -> Checked:
    """Check an answer to an exercise, on real ranks, with inputs that you have not seen.

    The first check in a notebook takes a few seconds longer: a helper process imports torch, and stays for the next.

    >>> import mpkit as mk
    >>> from mpkit.classroom.exercises.ranks.pass_the_token import pass_the_token
    >>> mk.check("pass-the-token", pass_the_token).passed
    True

    Args:
        name: the name of the exercise, as its notebook has it; `mk.progress()` lists all.
        answer: what the exercise asks for: a function, a class, a schedule, values.
        cluster: the cluster whose helper process is used; None: one that all checks share.

    Returns:
        The verdict. A wrong answer raises no exception; its verdict has a hint, more specific each time.

    Raises:
        ValueError: There is no such exercise, or the answer cannot be sent to ranks.
    """
    entry = find(name)
    packed = Answer.of(answer)
    done = Progress.read()
    before = done.done.get(name)
    room = shared_room() if cluster is None else Room(cluster)
    checked = judge(entry, packed, room, before.failures if before else 0)
    done.after(name, checked.passed).write()
    return checked


def progress(folder: str | Path | None = None) -> Overview:
    """List all exercises, and which of them you have solved.

    Args:
        folder: the folder of the notebooks, where the file with your progress is; None: the current one.
    """
    done = Progress.read(Path(folder) if folder is not None else None).done
    return Overview(
        tuple(
            (package.TITLE, tuple(of_family(package.__name__.rsplit(".", 1)[1]))) for package in families()
        ),
        done,
    )
