"""How a launch ended, in a form that goes through the store: the same error, or the same losses, for every process."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from mpkit.errors import CommMismatch, Deadlock, MpkitError, NotSerial, RankFailed

__all__ = ["Verdict"]

PLACE = ("rank", "step", "stage", "microbatch")


@dataclass(frozen=True)
class Verdict:
    """The end of a launch.

    Attributes:
        error: the error that every process raises; None: all ranks have finished.
        losses: the losses of a training, nan where unknown.
    """

    error: Exception | None = None
    losses: list[float] = field(default_factory=list)

    def to_json(self) -> str:
        """Return the error as JSON; losses go separately, since there may be millions."""
        error = self.error
        if error is None:
            return json.dumps({})
        facts: dict[str, Any] = {"kind": type(error).__name__, "message": str(error)}
        if isinstance(error, NotSerial):
            facts["step"] = error.step
        if isinstance(error, RankFailed):
            facts |= {name: getattr(error, name) for name in PLACE}
            facts |= {
                "traceback": error.traceback,
                "signal": error.signal,
                "other": getattr(error, "other", None),
            }
        return json.dumps({"error": facts})

    @classmethod
    def from_json(cls, text: str, losses: list[float]) -> Verdict:
        """Return the verdict from what `to_json` wrote, and the losses."""
        facts = json.loads(text)
        error = facts.get("error")
        return cls(None if error is None else _error(error), losses)


def _error(facts: dict[str, Any]) -> Exception:
    place = {name: facts.get(name) for name in PLACE[1:]}
    kind, message = facts["kind"], facts["message"]
    if kind == "CommMismatch":
        return CommMismatch(message, rank=facts["rank"], other=facts["other"], **place)
    if kind == "NotSerial":
        return NotSerial(message, step=facts["step"])
    if kind in ("RankFailed", "Deadlock"):
        known = Deadlock if kind == "Deadlock" else RankFailed
        return known(
            message, rank=facts["rank"], traceback=facts["traceback"], signal=facts["signal"], **place
        )
    return MpkitError(message)
