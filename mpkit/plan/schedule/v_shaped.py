"""V-shaped: two stages per rank, r on the way down and 2p-1-r on the way up, so that all ranks hold about as much.

Micro-batches on the way down turn on the last rank without a message, and rank 0 computes the loss. Both schedules
split some or all backwards into I and W (`mpkit.plan.schedule.zero_bubble`). `down` and `up` are a rank's two stages.
"""

from __future__ import annotations

from collections import Counter

from mpkit.plan.schedule.action import Action
from mpkit.plan.schedule.core import Schedule
from mpkit.plan.schedule.stage_to_rank import vee

__all__ = ["dualpipev", "zbv"]


def zbv(p: int, m: int) -> Schedule:
    """Build ZB-V: almost no bubble where F = I = W, with 1F1B's activations on every rank.

    >>> print(zbv(2, 4))
    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3   .
    rank 1 |   . 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    Rank r goes through these phases:

        fill        F down, 2(p-r)-1 times
        turn        F up, F down, r times
        first I's   F up, I up, W up, p-r times
        steady      F down, I down, W down, F up, I up, W up: as much goes out as comes in
        drain       I down, I up, r times; then I down, W down, p-r times
        rest        the remaining W's

    A rank needs 2p-1 micro-batches to be filled. With fewer the phases stay the same: the order is that of 2p-1
    micro-batches without those that do not exist.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (arXiv 2401.10241), section 6, and "Pipeline
    Parallelism with Controllable Memory", NeurIPS 2024, which places it among others.
    """
    rows = []
    for r in range(p):
        row = _Row(down=r, up=2 * p - 1 - r)
        down, up = row.down, row.up
        enough = max(m, 2 * p - 1)
        row.add("F down", 2 * (p - r) - 1)
        row.add("F up, F down", r)
        row.add("F up, I up, W up", p - r)
        while row.count["F", up] < enough:
            if row.count["F", down] < enough:
                row.add("F down")
            row.add("I down, W down, F up, I up, W up")
        row.add("I down, I up", r)
        row.add("I down, W down", p - r)
        row.add("W up", row.count["I", up] - row.count["W", up])
        row.add("W down", row.count["I", down] - row.count["W", down])
        rows.append(row.of_microbatches(m))
    return Schedule(rows, "zbv", vee(p))


def dualpipev(p: int, m: int) -> Schedule:
    """Build DualPipeV: one micro-batch's forward runs with another's backward (F & B); each hides the other's messages.

    >>> print(dualpipev(2, 4))
    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 ---   . 3F2 0B0 --- 3B2 ---   . 3F3 0B1 --- 3B3 --- 0I2 0W2 0I3 0W3
    rank 1 |   . 1F0 2F0 1F1 2F1 1F2 2B0 --- 2F2 1B0 --- 1F3 2B1 --- 2F3 1B1 --- 2B2 --- 1B2 ---   . 2I3 1I3 2W3 1W3

    Rank r goes through these phases, with the authors' numbers:

        1  F down, 2(p-1-r) times
        2  F down, F up, r+1 times
        3  I up, W, F up, p-1-r times
        4  F down & B up, F up & B down, m-2p+r+1 times: the main phase
        5  B up, F up & B down, p-1-r times
        6  a backward of up and one of down, r+1 times; the first half of them whole (B), the second half I alone
        7  W, I down, p-1-r times
        8  W, r+1 times

    Each W belongs to the oldest I without one. With more than 2p micro-batches phase 4 lasts longer; with fewer, the
    order is that of 2p micro-batches without those that do not exist. A rank is idle for (p-1)(F&B + B - 3W), where
    F&B = F + B unless a device runs both at the same time, and holds the activations of 2p+1 micro-batches. The results
    of F and B are sent when both are done, which costs nothing: their messages are hidden behind the next F & B. The
    all-to-alls of divided experts are hidden within it on devices that run both at once.

    Source: DeepSeek-AI, "DualPipe" (github.com/deepseek-ai/DualPipe, DualPipeV, after Sea AI Lab's "cut in half");
    "DeepSeek-V3 Technical Report", 2024, section 3.2.1.
    """
    rows = []
    together: set[Action] = set()
    for r in range(p):
        row = _Row(down=r, up=2 * p - 1 - r)
        row.add("F down", 2 * (p - 1 - r))
        row.add("F down, F up", r + 1)
        row.add("I up, W oldest, F up", p - 1 - r)
        main = max(m, 2 * p) - 2 * p + r + 1
        if r == p - 1:  # on the last rank the first pair stays apart, which shortens the bubble
            row.add("F down, B up, F up & B down")
            main -= 1
        row.add("F down & B up, F up & B down", main)
        row.add("B up, F up & B down", p - 1 - r)
        for i in range(2 * (r + 1)):
            row.add(f"{'B' if i <= r else 'I'} {'down' if i % 2 else 'up'}")
        row.add("W oldest, I down", p - 1 - r)
        row.add("W oldest", r + 1)
        rows.append(row.of_microbatches(m))
        together |= row.together
    return Schedule(rows, "dualpipev", vee(p), together)


class _Row:
    """A rank's row under construction.

    Attributes:
        count: by kind and stage, the number of micro-batches that have it; a B counts as both I and W.
        together: the forwards that run as one with a backward.
    """

    def __init__(self, down: int, up: int) -> None:
        self.down, self.up = down, up
        self.actions: list[Action] = []
        self.together: set[Action] = set()
        self.count: Counter[tuple[str, int]] = Counter()
        self._without_w: list[int] = []  # the stages of I's, oldest first

    def add(self, steps: str, times: int = 1) -> None:
        """Add steps such as "F down, B up" or "F down & B up", each for the next micro-batch of its kind and stage."""
        parts = [step.split() for step in steps.replace("&", ", &").split(", ")]
        for part in parts * times:
            if part[0] == "&":
                self.together.add(self.actions[-1])
            self._add(*part[-2:])

    def of_microbatches(self, m: int) -> list[Action]:
        """Return the actions of the first m micro-batches."""
        there = [action for action in self.actions if action.microbatch < m]
        pairs = zip(self.actions, self.actions[1:], strict=False)
        self.together -= {f for f, b in pairs if max(f.microbatch, b.microbatch) >= m}
        return there

    def _add(self, kind: str, which: str) -> None:
        stage = self._without_w[0] if which == "oldest" else {"down": self.down, "up": self.up}[which]
        self.actions.append(Action(kind, stage, self.count["I" if kind == "B" else kind, stage]))
        if kind == "I":
            self._without_w.append(stage)
        elif kind == "W":
            self._without_w.remove(stage)
        for one in "IW" if kind == "B" else kind:
            self.count[one, stage] += 1
