"""Read the memory.

The same model, trained four times with Adam in fp32: with DDP, and with ZeRO stages 1, 2 and 3, in some order. Here
is what a GPU holds in a step at most. Which run is which, how many GPUs are there, and how many parameters has the
model?

`held("A")` is a dict of bytes by category, each at its own peak: params, grads, optimizer, activations, buffers.
Adam keeps two numbers for each parameter; each number has 4 bytes. Buffers are what is lent for a while: buckets, and
what is gathered.

Answer with "ddp", "zero 1", "zero 2" or "zero 3" for A to D, and with whole numbers. The last question: how many bytes
of params, grads and optimizer together would ZeRO-1 take on {MORE} GPUs?

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, figure 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

from mpkit.course.framework.exercise import Mistake
from mpkit.course.framework.questions import Questions
from mpkit.course.framework.room import Room
from mpkit.course.lab import PUZZLES, is_near, read_answer, timeline

# %% given
SHEET = "ABCD"  # which run has which letter
LAYERS = 3  # of the model
MORE = 16  # GPUs


def held(letter: str) -> dict[str, int]:
    """Return the bytes that a GPU of run A, B, C or D holds, by category."""
    from mpkit.course.lab import puzzle

    return puzzle("read-the-memory", letter, SHEET, layers=LAYERS).peak_memory[0]


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
    SHEET[0]: "zero 2",
    SHEET[1]: "ddp",
    SHEET[2]: "zero 3",
    SHEET[3]: "zero 1",
    "GPUs": 4,
    # with DDP a GPU holds 67,108,864 bytes of params, and as many of grads, for each layer
    "parameters": 67_108_864 * LAYERS // 4,
    "bytes of states, ZeRO-1 on more GPUs": 67_108_864 * LAYERS * 2 + 134_217_728 * LAYERS // MORE,
    ### END SOLUTION
}


# %% checks
VARIES = {"SHEET": tuple(map("".join, permutations("ABCD"))), "LAYERS": (2, 3, 4, 5), "MORE": (8, 16, 32, 64)}
TWO, DDP, THREE, ONE = tuple(SHEET)
STATES = "bytes of states, ZeRO-1 on more GPUs"
PSI = 16_777_216 * LAYERS


def truth(room: Room) -> Mapping[str, str | int]:
    """Return the right values, read from the runs themselves."""
    names = dict(zip(SHEET, PUZZLES["read-the-memory"], strict=True))
    ddp = timeline("ddp", layers=LAYERS, room=room)
    whole = ddp.peak_memory[0]
    states = whole["params"] + whole["grads"] + whole["optimizer"] // MORE
    return {
        **names,
        "GPUs": ddp.world_size,
        "parameters": whole["params"] // 4,
        STATES: states,
    }


EXERCISE = Questions(
    solution=memory,
    called="memory",
    truth=truth,
    after="03-zero",
    place=40,
    start="Which categories are as large in all runs, and which are smaller in some? By which factor?",
    mistakes=(
        Mistake(
            "zero-1-and-2-swapped",
            (
                f"{TWO} and {ONE} differ in one category. Which one does ZeRO-2 shard that ZeRO-1 does not?",
                "Stage 1 shards the optimizer's states, stage 2 the gradients too, stage 3 the parameters too.",
            ),
            [('SHEET[0]: "zero 2"', 'SHEET[0]: "zero 1"'), ('SHEET[3]: "zero 1"', 'SHEET[3]: "zero 2"')],
        ),
        Mistake(
            "buffers-are-parameters",
            (
                f"What is sharded in {THREE}, and what are its buffers?",
                "ZeRO-3 gathers a layer's parameters when it needs them, and lets go of them again: that memory is "
                "lent, and counted as buffers. What a GPU keeps of the parameters is a shard.",
            ),
            [('SHEET[2]: "zero 3"', 'SHEET[2]: "ddp"'), ('SHEET[1]: "ddp"', 'SHEET[1]: "zero 3"')],
            when=lambda seen: read_answer(seen, THREE) == "ddp" or read_answer(seen, DDP) == "zero 3",
        ),
        Mistake(
            "bytes-for-parameters",
            (
                "How many bytes has a number in fp32?",
                "What `held` says are bytes. A parameter in fp32 has 4 of them.",
            ),
            [("LAYERS // 4", "LAYERS")],
            when=lambda seen: is_near(seen, "parameters", 4 * PSI),
        ),
        Mistake(
            "adam-keeps-one-number",
            (
                "How many bytes of optimizer states are there for each parameter, in the run that shards nothing?",
                "Adam keeps two moments, each as large as the parameters: 8 bytes per parameter in fp32. Each "
                f"of {MORE} GPUs holds one part of {MORE} of these.",
            ),
            [("134_217_728 * LAYERS", "67_108_864 * LAYERS")],
            when=lambda seen: is_near(seen, STATES, 8 * PSI + 4 * PSI // MORE, 0.0001),
        ),
        Mistake(
            "zero-1-shards-everything",
            (
                "Which of the three does ZeRO-1 shard?",
                "Only the optimizer's states get smaller with more GPUs; parameters and gradients stay whole on each "
                "of them. So more GPUs help less and less.",
            ),
            [
                (
                    "67_108_864 * LAYERS * 2 + 134_217_728 * LAYERS // MORE",
                    "(67_108_864 * LAYERS * 2 + 134_217_728 * LAYERS) // MORE",
                )
            ],
            when=lambda seen: is_near(seen, STATES, 16 * PSI / MORE),
        ),
        Mistake(
            "keeps-the-old-number-of-gpus",
            (
                "The optimizer's part: of how many GPUs is it a share, here and with more?",
                f"In run {ONE} each GPU has a fourth of the states. With {MORE} GPUs it is 8 ψ / {MORE}.",
            ),
            [("LAYERS // MORE", "LAYERS // 4")],
            when=lambda seen: is_near(seen, STATES, 10 * PSI, 0.0001),
        ),
        Mistake(
            "counts-categories-not-gpus",
            (
                "How can you see the number of GPUs from what one of them holds?",
                "A shard is one part of as many as there are replicas: divide what DDP holds of a category by what "
                "ZeRO holds.",
            ),
            [('"GPUs": 4', '"GPUs": 2')],
            when=lambda seen: isinstance(read_answer(seen, "GPUs"), int) and read_answer(seen, "GPUs") != 4,
        ),
    ),
    otherwise=("Put the four dicts side by side, one row per category.",),
)
