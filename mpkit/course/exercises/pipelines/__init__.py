"""Pipelines.

A pipeline consists of a schedule and of stages that send activations one way and gradients the other. First you write
schedules and watch their bubbles, then the parts that run them.
"""

TITLE = "Pipelines"
PLACE = 4


# %% given
def one_by_one(forwards: list[str], backwards: list[str], warm_up: int) -> str:
    """Return 1F1B's phases: the warm-up forwards; a forward and a backward in turn; the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    row = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        row += [forward, backward]
    return " ".join(row + backwards[len(forwards) - warm_up :])
