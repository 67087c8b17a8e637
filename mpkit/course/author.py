"""What the checks of an exercise are written with: each imports from here, and this page says how to write one.

An exercise is two files in `mpkit/course/exercises/FAMILY/`: NAME.md has the words (`mpkit.course.exercise_text`), and
NAME.py has the code, in this order:

    # %% given     what the student is given, if anything; what a whole family is given is in its `__init__.py`
    # %% answer    the student's cell, with the solution between ### BEGIN SOLUTION and ### END SOLUTION
    # %% checks    EXERCISE, one of the kinds below

The answer's parameters say what the student gets; `play` makes that on a rank, from a case, and `expected` says what
each rank should return. A case has another seed, other sizes, another number of ranks; the simplest comes first.

    OnRanks        a function or class that runs on ranks: `play(ctx, answer, case)`, or `call_with(inputs)`
    Schedules      a pipeline schedule, as a function of (p, m): budgets on its bubble and its live micro-batches
    Questions      a dict of values: `truth(room)` finds the right ones, best by running something

Budgets are checked once all results of a case are right. A measure is a function of what an answer did (`Seen`):

    collectives, calls(kind), messages         how many
    payload, ring, wire, sent_bytes            bytes: of the tensors, on a ring, in all, of messages only
    peak(category, ...)                        bytes that the fullest rank holds; needs `with Memory(ctx, parameters):`
    makespan, bubble, live                     seconds, idle share, micro-batches of a schedule

`serial` has small models, whole batches and serial training to compare with, in float64, all from the case's seed.
What the first cell of every exercise notebook imports (`mpkit.course.framework.source.IMPORTS`) is here too.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.equal import difference, spell
from mpkit.course.framework.exercise import Answer, Budget, Case, CheckRow, Seen
from mpkit.course.framework.kinds import OnRanks, Questions, call_with
from mpkit.course.framework.measures import (
    calls,
    collectives,
    copied_bytes,
    count_exposed_layers,
    gathers_and_layers,
    makespan,
    messages,
    node_bytes,
    payload,
    peak,
    ring,
    sent_bytes,
    wire,
)
from mpkit.course.framework.memory import Host, Memory
from mpkit.course.framework.own_stages import checkpoint_by_hand, record_stage
from mpkit.course.framework.room import PackedAnswer, Room
from mpkit.course.framework.schedules import Schedules, bubble, in_turns, live
from mpkit.trace import Kind, Lane

__all__ = [
    "Answer", "Any", "Budget", "Callable", "Case", "CheckRow", "F", "Host", "Iterable", "Kind", "Lane", "Memory",
    "OnRanks", "PackedAnswer", "Questions", "Room", "Schedules", "Seen", "Tensor", "bubble", "call_with", "calls",
    "checkpoint_by_hand", "collectives", "copied_bytes", "count_exposed_layers", "difference",
    "gathers_and_layers", "in_turns", "live", "makespan", "messages", "mk", "nn", "node_bytes", "payload", "peak",
    "record_stage", "ring", "sent_bytes", "serial", "spell", "torch", "wire",
]  # fmt: skip
