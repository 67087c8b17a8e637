"""The plain look that all plotly charts share, on light and dark backgrounds."""

from __future__ import annotations

from typing import Any

__all__ = ["GREY", "LINE", "LOOK", "SERIES"]

GREY, LINE = "#757d88", "rgba(128,128,128,0.25)"  # legible on light and dark backgrounds

LOOK: dict[str, Any] = {
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"color": GREY, "size": 12},
    "hoverlabel": {"font": {"color": "#1f2328"}, "bgcolor": "#ffffff"},
}
"""Arguments for `figure.update_layout(**LOOK, ...)`."""

SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""The colours of series, one after the other: the palette of Okabe and Ito (*Color Universal Design*, 2008)."""
