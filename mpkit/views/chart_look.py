"""The quiet look that all plotly charts share, on a light ground and on a dark one."""

from __future__ import annotations

from typing import Any

__all__ = ["GREY", "LINE", "LOOK"]

GREY, LINE = "#757d88", "rgba(128,128,128,0.25)"  # read on a light and on a dark ground

LOOK: dict[str, Any] = {
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"color": GREY, "size": 12},
    "hoverlabel": {"font": {"color": "#1f2328"}, "bgcolor": "#ffffff"},
}
"""For `figure.update_layout(**LOOK, ...)`."""
