"""Action: one step of one rank in a pipeline schedule, and how it is spelled."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["COMMUNICATION", "COMPUTE", "Action"]

COMPUTE = ("F", "B", "I", "W")
"""What an author writes. `F`: forward. `B`: backward, or split in two, `I`: gradients of the inputs, which
the stage before waits for, and `W`: gradients of the weights, which nobody does."""

COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
"""What `lower` adds. `SEND_F` passes a stage's output on, `RECV_F` takes the stage's input; `SEND_B` passes
the gradient of the stage's input back, `RECV_B` takes that of its output."""

_SPELLING = re.compile(rf"(\d+)({'|'.join((*COMMUNICATION, *COMPUTE))})(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """A kind, the stage that does it, and the micro-batch it is done for, all counted from 0.

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

    __repr__ = __str__

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what `str(action)` spells.

        Raises:
            ValueError: it spells no action.
        """
        match = _SPELLING.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{text!r} is no action. An action is spelled stage, kind, micro-batch, such as 2F0 for stage 2's "
                f"forward of micro-batch 0; the kinds are {', '.join(COMPUTE)} (and {', '.join(COMMUNICATION)}, "
                "which mpkit adds by itself)."
            )
        return cls(match[2], int(match[1]), int(match[3]))
