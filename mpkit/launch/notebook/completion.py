"""The tab key in a `%%ranks` cell: names and attributes of what lives on the ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

__all__ = ["add_matcher"]

BEFORE = re.compile(r"[\w.]*\Z")
LINE = re.compile(r"%%?ranks\b")


def add_matcher(shell: Any, complete: Callable[[str], list[str]]) -> None:
    """Let IPython's completer ask the ranks, in cells that begin with `%%ranks`.

    Args:
        shell: IPython's shell.
        complete: returns what a text can be completed to.
    """
    from IPython.core.completer import SimpleCompletion, context_matcher

    @context_matcher(identifier="mpkit.ranks", priority=1000)  # type: ignore[untyped-decorator]
    def on_ranks(context: Any) -> Any:
        text = context.full_text
        if not LINE.match(text.lstrip()) or (context.cursor_line == 0 and text.lstrip().startswith("%%")):
            return {"completions": [], "suppress": False}
        begun = BEFORE.search(context.line_with_cursor[: context.cursor_position])
        word = begun.group() if begun else ""
        found = complete(word)
        token = str(context.token)  # which of the word IPython replaces
        cut = len(word) - len(token) if word.endswith(token) else 0
        return {
            "completions": [SimpleCompletion(text=each[cut:], type="ranks") for each in found],
            "suppress": bool(found),
            "matched_fragment": token,
        }

    shell.Completer.custom_matchers[:] = [
        each
        for each in shell.Completer.custom_matchers
        if getattr(each, "matcher_identifier", "") != "mpkit.ranks"
    ]
    shell.Completer.custom_matchers.append(on_ranks)
