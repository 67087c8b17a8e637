"""mk.explore: compare schedules in a notebook, with sliders."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mpkit.common.tracebacks import public
from mpkit.plan.schedule.catalogue import ONE_F_ONE_B, ZB_H1
from mpkit.views.explorer.setting import ExplorerSetting

__all__ = ["explore"]


@public
def explore(*schedules: str, **setting: Any) -> Any:
    """Compare schedules in a notebook, with sliders and text to copy and edit.

    Rows train on ranks too: `cluster.train(model, data, mk.Plan.from_schedule(rows), ...)`.

    Args:
        schedules: one or two names, or rows of your own as text; by default 1F1B and ZB-H1.
        setting: initial values of the sliders: ranks, microbatches, virtual_stages, forward, input_grad, weight_grad,
            hop.

    Returns:
        The widget.

    Raises:
        ValueError: there is no such schedule or setting.
        ImportError: ipywidgets or anywidget is not installed.
    """
    from mpkit.views.explorer.explorer_view import Explorer  # needs the notebook packages

    known = [f.name for f in fields(ExplorerSetting) if f.name != "schedule"]
    if unknown := [name for name in setting if name not in known]:
        raise ValueError(f"explore({unknown[0]}=...): what can be set is {', '.join(known)}")
    given: tuple[Any, ...] = schedules
    if odd := [each for each in given if not isinstance(each, str)]:
        raise ValueError(
            f"explore({odd[0]!r}): a schedule's name or its rows as text, such as explore('gpipe', 'zb_h1')"
        )
    if len(schedules) > 2:
        raise ValueError(
            f"explore{schedules}: two at most are shown side by side: explore{schedules[:2]}, and the dropdowns "
            "have the others"
        )
    settings = [ExplorerSetting(name, **setting) for name in schedules or (ONE_F_ONE_B, ZB_H1)]
    for each in settings:
        each.plan  # noqa: B018  (raises if the settings cannot work)
    return Explorer(settings)
