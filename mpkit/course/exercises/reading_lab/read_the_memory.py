"""Read the memory."""

from collections.abc import Mapping

from mpkit.course.author import *
from mpkit.course.lab import PUZZLES, timeline

# %% given
LAYERS = 3  # of the model
MORE = 16  # GPUs


def held(letter: str) -> dict[str, int]:
    """Return the bytes that a GPU of run A, B, C or D holds, by category."""
    from mpkit.course.lab import puzzle

    return puzzle("read-the-memory", letter, layers=LAYERS).peak_memory[0]


# %% answer
memory = {
    ### BEGIN SOLUTION
    # instead: "A": ...,
    # instead: "B": ...,
    # instead: "C": ...,
    # instead: "D": ...,
    # instead: "GPUs": ...,
    # instead: "parameters": ...,
    # instead: "bytes of states, ZeRO-1 on more GPUs": ...,
    "A": "zero 2",
    "B": "ddp",
    "C": "zero 3",
    "D": "zero 1",
    "GPUs": 4,
    # with DDP a GPU holds 67,108,864 bytes of params, and as many of grads, for each layer
    "parameters": 67_108_864 * LAYERS // 4,
    "bytes of states, ZeRO-1 on more GPUs": 67_108_864 * LAYERS * 2 + 134_217_728 * LAYERS // MORE,
    ### END SOLUTION
}


# %% checks
STATES = "bytes of states, ZeRO-1 on more GPUs"


def truth(room: Room) -> Mapping[str, str | int]:
    """Return the right values, read from the runs themselves."""
    names = dict(zip("ABCD", PUZZLES["read-the-memory"], strict=True))
    ddp = timeline("ddp", layers=LAYERS, room=room)
    whole = ddp.peak_memory[0]
    states = whole["params"] + whole["grads"] + whole["optimizer"] // MORE
    return {**names, "GPUs": ddp.world_size, "parameters": whole["params"] // 4, STATES: states}


EXERCISE = Questions()
