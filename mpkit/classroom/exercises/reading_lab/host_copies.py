"""Copies to the host.

ZeRO-1 with the optimizer on the host: a GPU's memory holds none of Adam's states. The price is on the timeline, in the
lane "host". `run()` is the timeline of one step on four A100s.

How many bytes does a GPU copy to its host in a step, and how many back? How fast is that link, in bytes per second? And
then predict how many seconds a step takes

- if the link to the host were twice as fast,
- if the link between the GPUs were twice as fast,
- with the optimizer on the GPU again, and so without the copies (its step itself takes as long).

`run().to_dataframe()` has a row for each span: its lane, kind, start, end (seconds) and bytes, of all ranks. What a
prediction says may be off by 5 %.
"""

from __future__ import annotations

from collections.abc import Mapping

import mpkit as mk
from mpkit.classroom.framework.exercise import Mistake
from mpkit.classroom.framework.questions import Questions
from mpkit.classroom.framework.room import Room
from mpkit.classroom.lab import near, timeline
from mpkit.trace import Kind, Lane


# %% given
def run() -> mk.Timeline:
    """Return the timeline of a ZeRO-1 step with the optimizer on the host."""
    from mpkit.classroom.lab import puzzle

    return puzzle("host-copies", "A")


# %% answer
copies = {
    ### BEGIN SOLUTION
    # instead: "bytes to the host": ...,
    # instead: "bytes per second": ...,
    # instead: "seconds, twice the link to the host": ...,
    # instead: "seconds, twice the link between GPUs": ...,
    # instead: "seconds, without copies": ...,
    "bytes to the host": 67_108_864,
    "bytes per second": 67_108_864 / 0.002165,
    # two copies of 2.165 ms each
    "seconds, twice the link to the host": 0.01219 - 0.002165,
    # 1.26 ms of communication are exposed
    "seconds, twice the link between GPUs": 0.01219 - 0.00126 / 2,
    "seconds, without copies": 0.01219 - 2 * 0.002165,
    ### END SOLUTION
}


# %% checks
def truth(room: Room) -> Mapping[str, float | int]:
    """Return the right values, by replaying the run."""
    t = timeline("offload", room=room)
    hosted = t.spans[(t.spans["lane"] == Lane.HOST) & (t.spans["rank"] == 0)]
    out = hosted[hosted["kind"] == Kind.COPY_TO_HOST]
    seconds = float((out["end"] - out["start"]).sum())
    right = (
        int(out["bytes"].sum()),
        float(out["bytes"].sum()) / seconds,
        timeline("offload", host=2, room=room).step_time,
        timeline("offload", link=2, room=room).step_time,
        t.step_time - float((hosted["end"] - hosted["start"]).sum()),
    )
    return dict(zip(copies, right, strict=True))


BYTES, RATE, HOST, LINK, WITHOUT = copies

EXERCISE = Questions(
    solution=copies,
    called="copies",
    truth=truth,
    within=dict.fromkeys((RATE, HOST, LINK, WITHOUT), 0.025),
    after="03-zero",
    place=25,
    start="`rows = run().to_dataframe()`, and then `rows[(rows['lane'] == 'host') & (rows['rank'] == 0)]`.",
    mistakes=(
        Mistake(
            "bytes-of-all-gpus",
            (
                "Of how many GPUs are the rows that you added up?",
                "The table has the spans of all four ranks. The question is about one GPU: `rows['rank'] == 0`.",
            ),
            [('"bytes to the host": 67_108_864', '"bytes to the host": 4 * 67_108_864')],
        ),
        Mistake(
            "both-ways-together",
            (
                "What goes to the host, and what comes back?",
                "Gradients go to the host, the updated parameters come back: as many bytes each way, one after the "
                "other.",
            ),
            [('"bytes to the host": 67_108_864', '"bytes to the host": 2 * 67_108_864')],
        ),
        Mistake(
            "one-copy-gets-faster",
            (
                "How many copies are there in a step, and which of them go over the link to the host?",
                "Both do, one before the optimizer's step and one after it. Each takes half as long.",
            ),
            [("0.01219 - 0.002165", "0.01219 - 0.002165 / 2")],
            when=lambda seen: near(seen, HOST, 0.01219 - 0.002165 / 2, 0.01),
        ),
        Mistake(
            "twice-the-link-half-the-step",
            (
                "Which part of the step is spent on that link?",
                "Only the copies get shorter. They are 4.3 of 12.2 ms: half of that is saved.",
            ),
            [("0.01219 - 0.002165", "0.01219 / 2")],
            when=lambda seen: near(seen, HOST, 0.01219 / 2) or near(seen, LINK, 0.01219 / 2),
        ),
        Mistake(
            "copies-go-over-the-gpus-link",
            (
                "Which link do the copies take, and which the reduce-scatter and all-gather?",
                "A copy goes over PCIe, between a GPU and its host. NVLink connects the GPUs, and only what is "
                "exposed of their communication gets shorter there.",
            ),
            [("0.01219 - 0.00126 / 2", "0.01219 - 0.002165")],
            when=lambda seen: near(seen, LINK, 0.01219 - 0.002165),
        ),
        Mistake(
            "without-copies-one-is-left",
            (
                "How many copies does a step without offloading have?",
                "None: the gradients stay where they are, and so do the parameters. Both copies are saved.",
            ),
            [("0.01219 - 2 * 0.002165", "0.01219 - 0.002165")],
            when=lambda seen: near(seen, WITHOUT, 0.01219 - 0.002165),
        ),
    ),
    otherwise=("Print `run()`, and look for what is between the backward and the optimizer, and after it.",),
)
