"""mk.compare: compare timelines with each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpkit.common.tracebacks import public
from mpkit.timeline.comparison import Comparison, compare_timelines

if TYPE_CHECKING:
    from mpkit.launch.session.run import Run
    from mpkit.timeline.timeline import Timeline

__all__ = ["compare"]


@public
def compare(*timelines: Timeline | Run, **named: Timeline | Run) -> Comparison:
    """Put timelines below each other on one axis, and say what takes the time in each.

    A single run of a pipeline is compared with its prediction: the same schedule simulated with the mean times of
    its last step.

    Args:
        timelines: Timelines, or Runs, each on its own clock; they are named after their schedule and clock.
        named: more timelines, under names of your own.

    Returns:
        An object that prints as a table and shows itself in a notebook.

    Raises:
        ValueError: nothing to compare, or an argument that is neither a Timeline nor a Run.

    >>> import mpkit as mk
    >>> times = dict(forward=1, input_grad=1, weight_grad=1)
    >>> both = mk.compare(mk.simulate(mk.Plan.gpipe(4, 8), **times),
    ...                   mk.simulate(mk.Plan.pipeline("zb_h1", 4, 8), **times))
    >>> print(both)
                      step time     bubble       work    warm-up    message  cool-down
    gpipe, simulated     33.0 s     27.3 %     24.0 s     1.50 s     4.50 s     3.00 s
    zb_h1, simulated     27.0 s     11.1 %     24.0 s     1.50 s     1.50 s        0 s
    Work and idle time by cause: seconds per rank, averaged over ranks; they add up to the makespan.
    <BLANKLINE>
    zb_h1, simulated is 6.00 s (18.2%) shorter than gpipe, simulated, of it
        idle: message    -3.00 s
        idle: cool-down  -3.00 s
    """
    return compare_timelines([*(("", each) for each in timelines), *named.items()])
