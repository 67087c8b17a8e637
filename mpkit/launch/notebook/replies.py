"""What the ranks of a session answered: values, each with the ranks that have it; and errors, likewise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpkit.common.safe_text import escape, visible
from mpkit.common.tracebacks import internals_shown
from mpkit.errors import RankFailed
from mpkit.launch.notebook.exchange import Reply
from mpkit.launch.notebook.selection import spelt

__all__ = ["CellFailed", "failure", "show_values"]


class CellFailed(RankFailed):
    """A cell raised on some ranks; those that did not have run it to its end, and all keep their variables."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the ranks' tracebacks, without the frames of the notebook's own process."""
        return str(self).splitlines()


def same(answers: Mapping[int, Reply], key: Any) -> dict[Any, list[int]]:
    """Return the ranks by what is the same in their answers, the first rank's first."""
    ranks: dict[Any, list[int]] = {}
    for rank in sorted(answers):
        ranks.setdefault(key(answers[rank]), []).append(rank)
    return ranks


def show_values(answers: Mapping[int, Reply]) -> None:
    """Display the value of the cell's last expression, once for all ranks where it is the same."""
    from IPython.display import display

    by_value = same(answers, lambda answer: tuple(answer.shown.items()))
    for shown, ranks in by_value.items():
        bundle = dict(shown)
        if not bundle:
            continue
        label, lines = f"[{spelt(ranks)}]", bundle["text/plain"].splitlines()
        text = f"{label} {lines[0]}" if len(lines) == 1 else "\n".join([label, *lines])
        bundle["text/plain"] = "\n".join(visible(line) for line in text.splitlines())
        for kind in ("text/html", "image/svg+xml"):
            if kind in bundle:
                head = f'<div style="font-family:monospace;margin-top:6px">{escape(label)}</div>'
                bundle["text/html"] = head + bundle.pop(kind)
        display(bundle, raw=True)  # type: ignore[no-untyped-call]


def failure(answers: Mapping[int, Reply], world_size: int, note: str = "") -> CellFailed | None:
    """Return the error of the ranks that raised, the same one once; None if none did.

    Args:
        answers: by rank.
        world_size: the number of ranks.
        note: what to add at the end.
    """
    failed = {rank: each for rank, each in answers.items() if each.state == "error"}
    if not failed:
        return None
    kind = "traceback" if internals_shown() else "folded"
    by_error = same(failed, lambda answer: answer.error.get(kind) or answer.error["message"])
    parts = []
    for text, ranks in by_error.items():
        error = failed[ranks[0]].error
        parts.append(
            f"{spelt(ranks)} of {world_size}: {error['type']}: {error['message']}\n\n{text.rstrip()}"
        )
    if note:
        parts.append(note)
    first = min(failed)
    return CellFailed("\n\n".join(parts), rank=first, traceback=failed[first].error.get("traceback", ""))
