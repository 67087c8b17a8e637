"""Pipeline schedules as data.

A schedule lists each rank's actions in order; when they happen follows from what each needs. Authors write compute
only. `validate` says why a schedule cannot run, `lower` adds the sends and receives, `draw` shows it, and one runtime
(`mpkit.strategies.runtime.pipeline`) executes every valid schedule.

    play         an action, such as `2F0`, stage 2's forward of micro-batch 0; what it needs, when it can run; drawings
    core         Schedule: a row of actions for each rank, made of text, lists or a function; `lower` adds its messages
    schedules    those of the literature, pure functions of (p, m) or (p, m, v), and which rank holds which stage
    catalogue    the schedules by name; for a cost model, their bubbles, times, activations and where stages are
    validate     whether a schedule finishes, is complete and fits into memory
    greedy       orders found by a search (`mpkit.prediction.schedule_search`)
"""

from mpkit.plan.schedule.catalogue import NAMES, build_schedule
from mpkit.plan.schedule.core import Schedule, lower
from mpkit.plan.schedule.play import Action, draw, play
from mpkit.plan.schedule.validate import validate

__all__ = ["NAMES", "Action", "Schedule", "build_schedule", "draw", "lower", "play", "validate"]
