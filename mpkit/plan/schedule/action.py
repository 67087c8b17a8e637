"""An action, and the activations that are held between actions.

Action: one step of one rank in a pipeline schedule, and how it is spelled.

Live: the activations that a rank holds, computed from the order of its actions alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["COMMUNICATION", "COMPUTE", "Action", "live"]


COMPUTE = ("F", "B", "I", "W")
"""What an author writes. `F`: forward. `B`: backward, or split in two, `I`: gradients of the inputs, which
the previous stage waits for, and `W`: gradients of the weights, which no stage waits for."""

COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
"""What `lower` adds. `SEND_F` sends a stage's output, `RECV_F` receives the stage's input; `SEND_B` sends
the gradient of the stage's input back, `RECV_B` receives the gradient of its output."""

DIGITS = 5
"""Digits of a number: a schedule has an action for each, in a drawing of as many columns."""

_SPELLING = re.compile(rf"(\d*)({'|'.join((*COMMUNICATION, *COMPUTE))})(\d+)")


class Action(NamedTuple):
    """A kind, the stage that does it, and the micro-batch that it is done for, all counted from 0.

    >>> Action("F", stage=2, microbatch=0)
    2F0
    >>> Action.parse("1SEND_B7").kind
    'SEND_B'
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def __repr__(self) -> str:
        return str(self)

    @classmethod
    def parse(cls, text: str, stage: int | None = None) -> Action:
        """Read what `str(action)` spells.

        Args:
            text: an action's text, such as 2F0, or F0 if the stage is known.
            stage: the stage to assume if the text names none.

        Raises:
            ValueError: the text is not an action.
        """
        match = _SPELLING.fullmatch(text.strip())
        if match is None or (stage is None and not match[1]):
            raise ValueError(
                f"{text!r:.80} is no action. An action is spelled stage, kind, micro-batch, such as 2F0 for stage 2's "
                f"forward of micro-batch 0; the kinds are {', '.join(COMPUTE)} (and {', '.join(COMMUNICATION)}, "
                "which mpkit adds by itself). The stage may be left out where a rank holds one stage only: F0."
            )
        if max(len(match[1]), len(match[3])) > DIGITS:
            raise ValueError(f"{text!r:.80}: stages and micro-batches have numbers below {10**DIGITS:,}")
        named = int(match[1]) if match[1] else stage
        assert named is not None
        return cls(match[2], named, int(match[3]))


def live(row: Iterable[Action]) -> list[int]:
    """Return how many activations a rank holds while each action of its row runs: 1 per micro-batch and stage.

    A stage holds a micro-batch's activations from its F to its B, inclusive, or to its W if the backward is split: I
    frees nothing, since W needs what the forward kept.

    >>> live(map(Action.parse, "0F0 0F1 0I0 0F2 0W0 0B1 0B2".split()))
    [1, 2, 2, 3, 3, 2, 1]
    """
    held, now = [], 0
    for kind, _, _ in row:
        now += kind == "F"
        held.append(now)
        now -= kind in ("B", "W")
    return held
