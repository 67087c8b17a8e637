"""The badge of a run's proof, as HTML: what is said is in its words, and its colour says the same again."""

from __future__ import annotations

from mpkit.common.safe_text import escape
from mpkit.trace.proof import Proof
from mpkit.views.theme import STATUS

__all__ = ["badge"]

_COLOURS = {"equal": STATUS["good"], "not verified": STATUS["doubt"], "not equal": STATUS["bad"]}
_STYLE = (
    "border-radius:9px;padding:1px 9px;font-size:12px;font-weight:500;display:inline-block;line-height:1.5"
)


def badge(proof: Proof | None) -> str:
    """Return the badge; "" without a proof, or while nothing is known.

    >>> "&lt;b&gt;" in badge(Proof(why_not="<b>")), badge(None)
    (True, '')
    """
    if proof is None or not proof.badge:
        return ""
    return f'<span style="border:1.5px solid {_COLOURS[proof.status]};{_STYLE}">{escape(proof.badge)}</span>'
