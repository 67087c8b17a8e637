"""Zero bubble: the backward is split, and the half that no stage waits for fills what would be bubble.

`I`, the gradient of a stage's input, is sent to the previous stage immediately. `W`, the gradient of its weights, can
wait; until then the micro-batch's activations are kept. Every rank goes through these phases:

    warm-up      forwards only
    steady       a forward and an I in turn, and a W once the I's are ahead of the W's by more than a certain lead
    cool-down    the remaining I's, with W's between them
    rest         the remaining W's
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpkit.plan.schedule.action import Action
from mpkit.plan.schedule.core import Schedule
from mpkit.plan.schedule.one_f_one_b import in_turns
from mpkit.plan.schedule.stage_to_rank import loops

__all__ = ["interleaved_zb", "zb_h1", "zb_h2"]


def zb_h1(p: int, m: int) -> Schedule:
    """Build ZB-H1: no more activations than 1F1B's p micro-batches, and a third of its bubble.

    >>> print(zb_h1(3, 4))
    rank 0 | F0 F1 F2  .  . I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1 |  . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2 |  .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    A rank is idle for (p-1)(F+I-W), if W takes no longer than F or I; in 1F1B for (p-1)(F+I+W).

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1 and figure 3, top.
    """
    rows = []
    for s in range(p):
        forwards, inputs = _of_stage(s, m)
        rows.append(list(_fill_phases(forwards, inputs, warm_up=p - 1 - s, lead=s, lead_at_the_end=0)))
    return Schedule(rows, name="zb_h1")


def zb_h2(p: int, m: int) -> Schedule:
    """Build ZB-H2: twice as many warm-up forwards, and no bubble between a rank's first action and its last.

    >>> print(zb_h2(3, 6))
    rank 0 | F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5  .  .
    rank 1 |  . F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5  .
    rank 2 |  .  . F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

    A rank is idle for (p-1)(F+I-2W), counted from its own first action to its own last: rank r begins r forwards
    later than rank 0 and ends as much later. Over a step that begins and ends at the same time on all ranks, that takes
    as long as ZB-H1; it pays off if the next step begins without waiting for all ranks. A rank holds the activations of
    2p-1 micro-batches.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, sections 2.2 and 4 and figure 3, bottom.
    """
    rows = []
    for s in range(p):
        forwards, inputs = _of_stage(s, m)
        rows.append(
            list(_fill_phases(forwards, inputs, warm_up=2 * (p - 1 - s), lead=2 * s, lead_at_the_end=s))
        )
    return Schedule(rows, name="zb_h2")


def interleaved_zb(p: int, m: int, v: int = 2) -> Schedule:
    """Build interleaved zero bubble: interleaved 1F1B's turns of micro-batches, with ZB-H1's warm-up and W's.

    >>> print(interleaved_zb(2, 4))
    rank 0 | 0F0 0F1 2F0 2F1   . 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
    rank 1 |   . 1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3

    A rank is idle for (p-1)(F+I-W) of stages that are 1/v as large, and holds vp of their activations, or more if p
    does not divide m.

    Source: both combined, as in PyTorch's ScheduleInterleavedZeroBubble: Narayanan et al. 2021, section 2.2.2,
    and Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024.
    """
    rows = []
    for rank in range(p):
        turn, forwards, inputs = in_turns(rank, p, m, v, "I")
        warm_up = (v - 1) * turn + p - 1 - rank
        rows.append(list(_fill_phases(forwards, inputs, warm_up, lead=rank, lead_at_the_end=0)))
    return Schedule(rows, "interleaved_zb", loops(p, v))


def _of_stage(s: int, m: int) -> tuple[list[Action], list[Action]]:
    return [Action("F", s, i) for i in range(m)], [Action("I", s, i) for i in range(m)]


def _fill_phases(
    forwards: Sequence[Action], inputs: Sequence[Action], warm_up: int, lead: int, lead_at_the_end: int
) -> Iterator[Action]:
    """Yield the four phases of a rank with these F's and I's; a W runs once the I's lead by more than `lead`."""
    warm_up = min(warm_up, len(forwards))
    steady = len(forwards) - warm_up
    weights = [Action("W", stage, i) for _, stage, i in inputs]
    done = 0
    yield from forwards[:warm_up]
    for i in range(steady):
        yield forwards[warm_up + i]
        yield inputs[i]
        if i + 1 - done > lead:
            yield weights[done]
            done += 1
    for i in range(steady, len(inputs)):
        yield inputs[i]
        if i + 1 - done > lead_at_the_end:
            yield weights[done]
            done += 1
    yield from weights[done:]
