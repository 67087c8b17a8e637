"""mk.check and mk.progress, the functions that students call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpkit.common.disk import check_folder
from mpkit.common.tracebacks import public
from mpkit.course.catalogue import families, find, of_family
from mpkit.course.check_call import check_arguments, listen_to_cells
from mpkit.course.framework.local_trial import shared_room
from mpkit.course.framework.room import PackedAnswer, Room
from mpkit.course.judge import UNCOUNTED, Checked, is_stub, judge, look
from mpkit.course.progress import ExerciseProgress, Overview, Progress
from mpkit.errors import NeedsTorch

if TYPE_CHECKING:
    from mpkit.launch.session.cluster import Cluster

__all__ = ["check", "progress"]

listen_to_cells()  # here: Python evaluates the arguments of `mk.check`, and fails, before it calls it


@public
def check(
    name: str, answer: Any = None, *, variant: str = "", exam: bool = False, cluster: Cluster | None = None
) -> Checked:
    """Check an answer to an exercise, on real ranks, with inputs that you have not seen.

    The first check in a notebook takes a few seconds longer: a helper process imports torch, and stays for the next.

    >>> import mpkit as mk
    >>> from mpkit.course.exercises.ranks.pass_the_token import pass_the_token
    >>> mk.check("pass-the-token", pass_the_token).passed
    True

    Args:
        name: the name of the exercise, as its notebook has it; `mk.progress()` lists all.
        answer: what the exercise asks for: a function, a class, a schedule, values.
        variant: whose numbers the exercise has, as `VARIANT` in a notebook of your own says; "": the same for all.
        exam: whether to say only if there is an answer that runs: no verdict, no hint, and no try.
        cluster: the cluster whose helper process is used; None: one that all checks share.

    Returns:
        The verdict. A wrong answer raises no exception; its verdict has a hint, more specific for each new answer. A
        machine that is too busy to run the ranks gives "not judged: busy", which is no try.

    Raises:
        ValueError: There is no such exercise, the variant is not yours, or the answer is not a function or class where
            one is asked for, or cannot be sent to ranks.
        NeedsTorch: The exercise needs PyTorch, and this Python has none, such as in a browser.
    """
    entry = find(name, variant)
    if not entry.runs_here:
        raise NeedsTorch(
            f"mk.check({name!r}, ...) runs answers with PyTorch, most of them on several ranks, and this Python has no "
            "PyTorch (in a browser there is none to install). mk.progress() lists the exercises that work here. On a "
            "computer of your own, pip install mpkit brings PyTorch."
        )
    check_arguments(entry, answer)
    packed = PackedAnswer.pack(answer)
    done = Progress.read()
    if entry.varies:
        done = _of_student(done, name, variant)
    if exam or entry.is_sealed:
        done.write()
        return look(entry, packed, shared_room() if cluster is None else Room(cluster))
    before = done.done.get(name, ExerciseProgress())
    room = shared_room() if cluster is None else Room(cluster)
    stub = is_stub(entry, packed)
    checked = judge(entry, packed, room, 0 if stub else before.earlier(packed.print))
    if packed.print in before.wrong and not checked.passed:
        checked = replace(checked, again=True)
    counts = not stub and checked.mistake not in UNCOUNTED
    done.add_check(name, checked.passed, packed.print, counts=counts, score=checked.score).write()
    return checked


def _of_student(done: Progress, name: str, variant: str) -> Progress:
    """Return the progress, which is one student's from the first check of a variant on."""
    if done.variant and done.variant != variant:
        raise ValueError(
            f"check({name!r}, ..., variant={variant!r}): the progress in this folder is that of {done.variant!r}, and "
            f"everybody has numbers of their own. Check it with variant={done.variant!r}; to work on another "
            f"notebook, put it into a folder of its own"
        )
    return replace(done, variant=variant)


@public
def progress(folder: str | Path | None = None) -> Overview:
    """List all exercises, and which of them you have solved.

    Args:
        folder: the folder of the notebooks, where the file with your progress is; None: the current one.

    Raises:
        ValueError: it is no path.
    """
    done = Progress.read(check_folder("mk.progress", folder) if folder is not None else None).done
    return Overview(
        tuple(
            (package.TITLE, tuple(of_family(package.__name__.rsplit(".", 1)[1]))) for package in families()
        ),
        done,
    )
