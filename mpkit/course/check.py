"""mk.check and mk.progress, the functions that students call."""

from typing import Any

from mpkit.common.tracebacks import public
from mpkit.course.catalogue import ExerciseEntry, families, find, of_family
from mpkit.course.framework.room import PackedAnswer, shared_room
from mpkit.course.judge import UNCOUNTED, is_stub, judge
from mpkit.course.progress import ExerciseProgress, Overview, Progress
from mpkit.course.verdict import Checked


@public
def check(name: str, answer: Any = None) -> Checked:
    """Check an answer to an exercise, on real ranks, with inputs that you have not seen.

    The first check in a notebook takes a few seconds longer: a helper process imports torch, and stays for the next.

    >>> import mpkit as mk
    >>> from mpkit.course.exercises.ranks.pass_the_token import pass_the_token
    >>> mk.check("pass-the-token", pass_the_token).passed
    True

    Args:
        name: the name of the exercise, as its notebook has it; `mk.progress()` lists all.
        answer: what the exercise asks for: a function, a class, a schedule, values.

    Returns:
        The verdict. A wrong answer raises no exception; its verdict has a hint, more specific for each new answer. A
        machine that is too busy to run the ranks gives "not judged: busy", which is no try.

    Raises:
        ValueError: There is no such exercise, or the answer is not a function or class where one is asked for, or
            cannot be sent to ranks.
    """
    entry = find(name)
    check_arguments(entry, answer)
    packed = PackedAnswer.pack(answer)
    done = Progress.read()
    room = shared_room()
    stub = is_stub(entry, packed)
    before = done.done.get(name, ExerciseProgress())
    checked = judge(entry, packed, room, 0 if stub else before.earlier(packed.print))
    counts = not stub and checked.mistake not in UNCOUNTED
    done.add_check(name, checked.passed, packed.print, counts=counts).write()
    return checked


def check_arguments(entry: ExerciseEntry, answer: object) -> None:
    """Reject what cannot be an answer to an exercise that asks for a function or a class.

    >>> check_arguments(find("pass-the-token"), "pass_the_token")
    Traceback (most recent call last):
        ...
    ValueError: mk.check('pass-the-token', 'pass_the_token'): the answer is the function pass_the_token itself, not of \
the type str; write mk.check('pass-the-token', pass_the_token), without quotes and parentheses

    Raises:
        ValueError: The answer cannot be called.
    """
    if callable(answer) or not callable(entry.exercise.solution):
        return
    wanted = entry.exercise.name_of_answer
    kind = "class" if wanted[0].isupper() else "function"
    got = f"{answer!r}"
    short = got if len(got) <= 30 else f"{got[:27]}..."
    what = "None" if answer is None else f"of the type {type(answer).__name__}"
    raise ValueError(
        f"mk.check({entry.name!r}, {short}): the answer is the {kind} {wanted} itself, not {what}; write "
        f"mk.check({entry.name!r}, {wanted}), without quotes and parentheses"
    )


@public
def progress() -> Overview:
    """List all exercises, and which of them you have solved: the file beside the notebook says so."""
    named = [(package.TITLE, of_family(package.__name__.rsplit(".", 1)[1])) for package in families()]
    return Overview(named, Progress.read().done)
