"""mk.explore: compare schedules in a notebook, with sliders."""

from typing import Any

from mpkit.common.tracebacks import public
from mpkit.plan.schedule.catalogue import ONE_F_ONE_B, ZB_H1
from mpkit.timeline.comparison import compare_timelines
from mpkit.views.page.trial import MICROBATCHES, RANKS, SLIDERS, simulated


@public
def explore(*schedules: str, **setting: float) -> Any:
    """Compare schedules in a notebook, with sliders and text to copy and edit.

    All is played and drawn in the browser, as on a page that `Timeline.to_html` writes: it works without a kernel too.
    Rows train on ranks: `cluster.train(model, data, mk.Plan.from_schedule(rows), ...)`.

    Args:
        schedules: one or two names, or rows of your own as text; by default 1F1B and ZB-H1.
        setting: initial values of the sliders: ranks, microbatches, forward, input_grad, weight_grad, hop. Times are
            seconds of a rank's share of the model, per micro-batch.

    Returns:
        The widget.

    Raises:
        ValueError: there is no such schedule or setting.
        ImportError: anywidget is not installed.
    """
    from mpkit.views.page.explorer import Explorer  # needs the notebook packages

    known = [name for name in SLIDERS if name != "backward"]
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
    for name, within in (("ranks", RANKS), ("microbatches", MICROBATCHES)):
        if setting.get(name, within[0]) not in within:
            raise ValueError(
                f"explore({name}={setting[name]!r}): the slider reaches {within[0]} to {within[-1]}; "
                "mk.simulate(mk.Plan(pp=..., schedule=..., microbatches=...)) has no such limits"
            )
    chosen = schedules or (ONE_F_ONE_B, ZB_H1)
    still = compare_timelines([(name, simulated(name, setting)) for name in chosen])  # or raises
    return Explorer(chosen, setting, still)
