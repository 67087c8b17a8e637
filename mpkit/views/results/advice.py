"""Advice in a notebook: the best plan of each family as a table, and all below the reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpkit.common.safe_text import escape
from mpkit.common.table import table_html
from mpkit.common.units import percent, seconds
from mpkit.views.theme import WHOLE_WORDS

if TYPE_CHECKING:
    from mpkit.prediction.advice.advice import Advice

__all__ = ["advice_parts", "advice_table"]

GIB = 2**30


def advice_table(advice: Advice) -> Any:
    """Lay out the best plan of each family, the simplest first: what every further part gains."""
    from IPython.display import HTML

    rows = [["parts", "step", "longer", "GiB", "plan"]]
    for family in advice.families:
        simplest = ", the simplest within 5 %" if family.plan == advice.simplest else ""
        longer = percent(family.longer) if family.longer > 0 else "the best"
        figures = seconds(family.seconds), longer, f"{family.memory / GIB:.1f}"
        rows.append([f"{family.words}{simplest}", *figures, repr(family.plan)])
    caption = f"What each further part gains, of {len(advice.found):,} plans that fit"
    return HTML(table_html(rows, (0, 4), caption))


def advice_parts(advice: Advice) -> list[Any]:
    """Return what a notebook shows of an advice, from top to bottom: nothing but the words if no plan fits."""
    from IPython.display import HTML

    words = HTML(f'<pre style="{WHOLE_WORDS}">{escape(str(advice))}</pre>')
    return [words] if advice.best is None else [words, advice_table(advice), advice.figure()]
