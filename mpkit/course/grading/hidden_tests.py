"""An answer judged apart from the student's code: what the hidden tests of nbgrader call.

Such a test runs in the student's own kernel, where `mk` and `mk.check` may be the student's by then. This module is
imported anew by name, and the verdict comes from a process that has never run the student's code (`judge_process`).
"""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mpkit.course.catalogue import find
from mpkit.course.framework.room import PackedAnswer
from mpkit.course.grading.grader import environment
from mpkit.course.grading.judge_process import Judges
from mpkit.course.sandbox.guard import Guard
from mpkit.course.verdict import NotSolved


def require(name: str, answer: Any) -> bool:
    """Return True if an answer to an exercise is right.

    Args:
        name: the name of the exercise.
        answer: the answer, as `mk.check` takes it.

    Raises:
        NotSolved: the answer is wrong, or there is no verdict; the message has the table, or says why.
    """
    entry = find(name)
    checked, why = _judges().judge(entry, PackedAnswer.pack(answer).packed)
    if checked is None:
        raise NotSolved(f"{entry.text.title}: no verdict, since {why}")
    return checked.require().passed


@functools.cache
def _judges() -> Judges:
    """Return the process that judges; it stays for the notebook's next tests, until Python ends."""
    folder = Path(tempfile.mkdtemp(prefix="mpkit-apart-"))
    judges = Judges(folder, environment(folder), Guard(memory=12 * 2**30, processes=100))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(judges.close)  # before that
    return judges
