"""The plain look that all plotly charts share, on light and dark backgrounds."""

from __future__ import annotations

from typing import Any

__all__ = ["GREY", "LINE", "LOOK"]

GREY, LINE = "#757d88", "rgba(128,128,128,0.25)"  # legible on light and dark backgrounds

LOOK: dict[str, Any] = {
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"color": GREY, "size": 12},
    "hoverlabel": {"font": {"color": "#1f2328"}, "bgcolor": "#ffffff"},
}
"""Arguments for `figure.update_layout(**LOOK, ...)`."""
