"""Read the memory.

The same model, trained four times with Adam in fp32: with DDP, and with ZeRO stages 1, 2 and 3, in some order. Here
is what a GPU holds in a step at most. Which run is which, how many GPUs are there, and how many parameters has the
model?

`held("A")` is a dict of bytes by category, each at its own peak: params, grads, optimizer, activations, buffers.
Adam keeps two numbers for each parameter; each number has 4 bytes. Buffers are what is lent for a while: buckets, and
what is gathered.

Answer with "ddp", "zero 1", "zero 2" or "zero 3" for A to D, and with whole numbers. The last question: how many bytes
of params, grads and optimizer together would ZeRO-1 take on 16 GPUs?

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, figure 1.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpkit.classroom.framework.exercise import Mistake
from mpkit.classroom.framework.questions import Questions
from mpkit.classroom.framework.room import Room
from mpkit.classroom.lab import PUZZLES, given, near, timeline


# %% given
def held(letter: str) -> dict[str, int]:
    """Return the bytes that a GPU of run A, B, C or D holds, by category."""
    from mpkit.classroom.lab import puzzle

    return puzzle("read-the-memory", letter).peak_memory[0]


# %% answer
memory = {
    ### BEGIN SOLUTION
    # instead: "A": ...,
    # instead: "B": ...,
    # instead: "C": ...,
    # instead: "D": ...,
    # instead: "GPUs": ...,
    # instead: "parameters": ...,
    # instead: "bytes of states, ZeRO-1 on 16 GPUs": ...,
    "A": "zero 2",
    "B": "ddp",
    "C": "zero 3",
    "D": "zero 1",
    "GPUs": 4,
    "parameters": 201_326_592 // 4,
    "bytes of states, ZeRO-1 on 16 GPUs": 201_326_592 + 201_326_592 + 402_653_184 // 16,
    ### END SOLUTION
}


# %% checks
def truth(room: Room) -> Mapping[str, str | int]:
    """Return the right values, read from the runs themselves."""
    names = PUZZLES["read-the-memory"]
    ddp = timeline("ddp", room=room)
    whole = ddp.peak_memory[0]
    states = whole["params"] + whole["grads"] + whole["optimizer"] // 16
    return {
        **names,
        "GPUs": ddp.world_size,
        "parameters": whole["params"] // 4,
        "bytes of states, ZeRO-1 on 16 GPUs": states,
    }


STATES = "bytes of states, ZeRO-1 on 16 GPUs"
PSI = 50_331_648

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
                "A and D differ in one category. Which one does ZeRO-2 shard that ZeRO-1 does not?",
                "Stage 1 shards the optimizer's states, stage 2 the gradients too, stage 3 the parameters too.",
            ),
            [('"A": "zero 2"', '"A": "zero 1"'), ('"D": "zero 1"', '"D": "zero 2"')],
        ),
        Mistake(
            "buffers-are-parameters",
            (
                "What is sharded in C, and what are its buffers?",
                "ZeRO-3 gathers a layer's parameters when it needs them, and lets go of them again: that memory is "
                "lent, and counted as buffers. What a GPU keeps of the parameters is a shard.",
            ),
            [('"C": "zero 3"', '"C": "ddp"'), ('"B": "ddp"', '"B": "zero 3"')],
            when=lambda seen: given(seen, "C") == "ddp" or given(seen, "B") == "zero 3",
        ),
        Mistake(
            "bytes-for-parameters",
            (
                "How many bytes has a number in fp32?",
                "What `held` says are bytes. A parameter in fp32 has 4 of them.",
            ),
            [("201_326_592 // 4", "201_326_592")],
            when=lambda seen: near(seen, "parameters", 4 * PSI),
        ),
        Mistake(
            "adam-keeps-one-number",
            (
                "How many bytes of optimizer states are there for each parameter, in the run that shards nothing?",
                "Adam keeps two moments, each as large as the parameters: 8 bytes a parameter in fp32. 16 GPUs hold "
                "a 16th of these each.",
            ),
            [("402_653_184 // 16", "201_326_592 // 16")],
            when=lambda seen: near(seen, STATES, 8 * PSI + PSI // 4, 0.001),
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
                    "201_326_592 + 201_326_592 + 402_653_184 // 16",
                    "(201_326_592 + 201_326_592 + 402_653_184) // 16",
                )
            ],
            when=lambda seen: near(seen, STATES, PSI),
        ),
        Mistake(
            "keeps-the-old-number-of-gpus",
            (
                "The optimizer's part: of how many GPUs is it a share, here and with 16?",
                "In run D each GPU has a fourth of the states. With 16 GPUs it is a 16th: 8 ψ / 16.",
            ),
            [("402_653_184 // 16", "402_653_184 // 4")],
            when=lambda seen: near(seen, STATES, 10 * PSI, 0.001),
        ),
        Mistake(
            "counts-categories-not-gpus",
            (
                "How can you see the number of GPUs from what one of them holds?",
                "A shard is one part of as many as there are replicas: divide what DDP holds of a category by what "
                "ZeRO holds.",
            ),
            [('"GPUs": 4', '"GPUs": 2')],
            when=lambda seen: isinstance(given(seen, "GPUs"), int) and given(seen, "GPUs") != 4,
        ),
    ),
    otherwise=("Put the four dicts side by side, a row a category.",),
)
