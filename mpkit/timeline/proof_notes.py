"""What a reader should know of a run's equality with serial training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpkit.trace.proof import Proof

__all__ = ["proof_notes"]


def proof_notes(meta: Mapping[str, Any]) -> list[str]:
    """Return the line of the run's proof; none for a trace without one.

    >>> proof_notes({"proof": {"steps": [1, 2], "loss": 0.0, "weights": 1e-16}})
    ['Equal to serial training in steps 1 and 2: loss within 0, weights within 1e-16.']
    """
    proof = Proof.from_trace(meta.get("proof"))
    if proof is None or proof.why_not == "verify=False":
        return []
    line = str(proof)
    return [f"{line[:1].upper()}{line[1:]}."]
