"""Pipeline schedules as data.

A schedule says, for each rank, which actions it does in which order; when they happen follows from what each needs.
Authors write compute only. `validate` says why a schedule cannot run, `lower` adds the sends and receives,
`draw` shows it, and one runtime (`mpkit.parallel.pipeline`) executes any that is valid.

    action      one step of one rank: `2F0` is stage 2's forward of micro-batch 0
    core        Schedule: a row of actions for each rank; what an action needs; `play`: when each can run
    catalogue   the schedules by name, pure functions of (p, m)
    validate    would it finish, and do what it should?
    lower       sends and receives, added
    grid        drawn in text
"""

from mpkit.schedule.action import Action
from mpkit.schedule.catalogue import NAMES, build, gpipe, naive
from mpkit.schedule.core import Schedule, play
from mpkit.schedule.grid import draw
from mpkit.schedule.lower import lower
from mpkit.schedule.validate import validate

__all__ = ["NAMES", "Action", "Schedule", "build", "draw", "gpipe", "lower", "naive", "play", "validate"]
