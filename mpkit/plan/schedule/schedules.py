"""The schedules of the literature: pure functions of (p, m) or (p, m, v), after the two ways to place stages on ranks.

In the drawings time runs to the right, each row is a rank, `F2` is the forward of micro-batch 2, and a backward `B2`
takes twice as long as a forward, as the dashes show. Dots are the bubble. If a rank holds several stages, the drawing
names the stage too: `3F2`.

All forwards first, then all backwards: naive (one micro-batch at a time), GPipe, and looped BFS.

One forward, one backward: 1F1B, interleaved 1F1B, and overlapped 1F1B of pairs that run as one. The phases of a rank:

    warm-up      forwards only, until the first gradient can have arrived
    steady       forwards and backwards in turn: as many activations are freed as are made
    cool-down    the remaining backwards

Zero bubble: `I`, the gradient of a stage's input, goes to the previous stage immediately. `W`, the gradient of its
weights, can wait, and fills what would be bubble; until then the micro-batch's activations are kept. The phases:

    warm-up      forwards only
    steady       a forward and an I in turn, and a W once the I's are ahead of the W's by more than a certain lead
    cool-down    the remaining I's, with W's between them
    rest         the remaining W's

V-shaped: two stages per rank, `down` (r) and `up` (2p-1-r), so that all ranks hold about as much. Micro-batches turn on
the last rank without a message, and rank 0 computes the loss. Both schedules split some or all backwards into I and W.
"""

from collections import Counter
from collections.abc import Callable
from itertools import accumulate

from mpkit.plan.schedule.core import Schedule
from mpkit.plan.schedule.play import Action


def loops(p: int, v: int = 1) -> tuple[int, ...]:
    """Place stage s on rank s mod p: the model goes round all p ranks v times (Narayanan et al. 2021, section 2.2).

    >>> loops(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(p)) * v


def vee(p: int) -> tuple[int, ...]:
    """Place stages r and 2p-1-r on rank r: the model goes down the ranks and comes back up.

    Rank 0 keeps the activations of the first stage longest and those of the last stage shortest: all ranks hold about
    as much. Source: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024.

    >>> vee(3)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(p), *reversed(range(p)))


def naive(p: int, m: int = 1) -> Schedule:
    """Build naive model parallelism: the model is cut over p ranks, and one works while the others wait for it.

    With m > 1 each micro-batch runs forward and backward before the next one starts (gradient accumulation), which
    saves memory but no time: the bubble stays (p-1)/p.

    >>> print(naive(3))
    rank 0 | F0  .  .  .  .  .  . B0 --
    rank 1 |  . F0  .  .  . B0 --  .  .
    rank 2 |  .  . F0 B0 --  .  .  .  .
    """
    return Schedule([[Action(kind, s, i) for i in range(m) for kind in "FB"] for s in range(p)], name="naive")


def gpipe(p: int, m: int) -> Schedule:
    """Build GPipe: the batch is split into m micro-batches; all forwards run in order, then all backwards in reverse.

    >>> print(gpipe(3, 4))
    rank 0 | F0 F1 F2 F3  .  .  .  .  .  . B3 -- B2 -- B1 -- B0 --
    rank 1 |  . F0 F1 F2 F3  .  .  . B3 -- B2 -- B1 -- B0 --  .  .
    rank 2 |  .  . F0 F1 F2 F3 B3 -- B2 -- B1 -- B0 --  .  .  .  .

    The bubble is (p-1)/(m+p-1) of the step, which is small once m >= 4p. Each rank holds the activations of all m
    micro-batches or, with recomputation, only their inputs and the activations of one.

    Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS
    2019, section 2.3 and figure 2c.
    """
    row = [*(("F", i) for i in range(m)), *(("B", i) for i in reversed(range(m)))]
    return Schedule([[Action(kind, stage, i) for kind, i in row] for stage in range(p)], name="gpipe")


def looped_bfs(p: int, m: int, v: int = 2) -> Schedule:
    """Build looped BFS: GPipe with v stages per rank; all micro-batches run through a stage before the next.

    >>> print(looped_bfs(2, 3))
    rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2   .   .   . 2B2 --- 2B1 --- 2B0 --- 0B2 --- 0B1 --- 0B0 ---
    rank 1 |   . 1F0 1F1 1F2 3F0 3F1 3F2 3B2 --- 3B1 --- 3B0 --- 1B2 --- 1B1 --- 1B0 ---   .   .

    A stage takes 1/v of the time, so a loop comes round sooner and the bubble is (p-1)/(vm+p-1); all v m activations
    are held. A stage's work is done in one piece, so sharded replicas can gather its weights once per step.

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023.
    """
    rows = []
    for rank in range(p):
        stages = range(rank, p * v, p)
        forwards = [Action("F", s, i) for s in stages for i in range(m)]
        backwards = [Action("B", s, i) for s in reversed(stages) for i in reversed(range(m))]
        rows.append(forwards + backwards)
    return Schedule(rows, "looped_bfs", loops(p, v))


def one_f_one_b(p: int, m: int) -> Schedule:
    """Build 1F1B: a rank's backward runs as soon as it can, so at most p activations are held, whatever m is.

    >>> print(one_f_one_b(3, 4))
    rank 0 | F0 F1 F2  .  .  .  . B0 -- F3 B1 --  . B2 --  . B3 --
    rank 1 |  . F0 F1  .  . B0 -- F2 B1 -- F3 B2 --  . B3 --  .  .
    rank 2 |  .  . F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --  .  .  .  .

    The bubble is GPipe's, (p-1)/(m+p-1). Rank r holds the activations of p-r micro-batches; in GPipe, of all m.

    Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.2;
    with a flush after each batch, as here: Narayanan et al. 2021 (below), section 2.2.1 and figure 4.
    """
    return _in_phases("1f1b", p, m, 1, lambda rank, turn: p - 1 - rank)


def interleaved_1f1b(p: int, m: int, v: int = 2) -> Schedule:
    """Build interleaved 1F1B: v stages per rank, run in turns of p micro-batches.

    >>> print(interleaved_1f1b(2, 4))
    rank 0 | 0F0 0F1 2F0 2F1 0F2   . 2B0 --- 0F3 2B1 --- 2F2 0B0 --- 2F3 0B1 ---   . 2B2 ---   . 2B3 --- 0B2 --- 0B3 ---
    rank 1 |   . 1F0 1F1 3F0 3B0 --- 3F1 3B1 --- 1F2 1B0 --- 1F3 1B1 --- 3F2 3B2 --- 3F3 3B3 --- 1B2 --- 1B3 ---   .   .

    The bubble shrinks to (p-1)/(vm+p-1), at the cost of v times as many messages and 1 + (p-1)/(pv) times 1F1B's
    activations (of stages that are 1/v as large). The paper requires that p divides m. Otherwise turns here are longer
    than p, and as even as possible: the bubble stays the same, and more activations are held.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    SC 2021, section 2.2.2 and figure 4.
    """
    return _in_phases("interleaved_1f1b", p, m, v, lambda rank, turn: (v - 1) * turn + 2 * (p - 1 - rank))


def overlapped_1f1b(p: int, m: int, v: int = 1) -> Schedule:
    """Build interleaved 1F1B whose steady phase is of pairs (F & B), so that each hides the other's all-to-alls.

    >>> overlapped_1f1b(1, 4), overlapped_1f1b(2, 2, 2).spelled()[1]
    (Schedule(['0F0 0F1&0B0 0F2&0B1 0F3&0B2 0B3'], name='overlapped_1f1b'), '1F0 1F1 3F0 3F1&3B0 3B1 1B0 1B1')

    The warm-up is one forward longer than interleaved 1F1B's: no forward of a pair makes what its backward needs. A
    rank holds the activations of one more stage and micro-batch for it. One rank of one stage pairs each backward
    with the next micro-batch's forward.

    Source: Megatron-Core (d98e8a6), `pipeline_parallel/combined_1f1b.py` and `get_pp_rank_microbatches`, by
    `--overlap-moe-expert-parallel-comm`; with several ranks it has several stages on each.
    """
    return _in_phases(
        "overlapped_1f1b", p, m, v, lambda rank, turn: (v - 1) * turn + 2 * (p - 1 - rank) + 1, in_pairs=True
    )


def in_turns(rank: int, p: int, m: int, v: int, backward: str) -> tuple[int, list[Action], list[Action]]:
    """Return the length of a rank's first turn, and the orders of its forwards and backwards.

    A turn of p micro-batches runs through one of the rank's stages before the next. If p does not divide m, there are
    floor(m / p) turns, as even as possible, the longer ones first: a turn shorter than p would leave ranks waiting.

    >>> in_turns(0, 2, 5, 2, "B")[:2]
    (3, [0F0, 0F1, 0F2, 2F0, 2F1, 2F2, 0F3, 0F4, 2F3, 2F4])
    """
    stages, count = range(rank, p * v, p), max(1, m // p)
    lengths = [m // count + (number < m % count) for number in range(count)]
    turns = [range(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]
    forwards = [Action("F", s, i) for turn in turns for s in stages for i in turn]
    backwards = [Action(backward, s, i) for turn in turns for s in reversed(stages) for i in turn]
    return lengths[0], forwards, backwards


def _in_phases(
    name: str, p: int, m: int, v: int, warm_up: Callable[[int, int], int],
    lead: Callable[[int], tuple[int, int]] | None = None, *, in_pairs: bool = False,
) -> Schedule:  # fmt: skip
    """Build a schedule in which each rank runs a warm-up of forwards, a steady phase in turns and a cool-down.

    Args:
        name: the schedule's name.
        p, m, v: ranks, micro-batches, stages per rank.
        warm_up: returns a rank's forwards before its first backward; it takes the rank and its first turn's length.
        lead: returns by how much a rank's I's are ahead before a W runs, in the steady phase and in the cool-down.
            None: backwards are whole.
        in_pairs: whether a forward of the steady phase runs as one with its backward.
    """
    rows, together = [], list[Action]()
    for rank in range(p):
        turn, forwards, backwards = in_turns(rank, p, m, v, "I" if lead else "B")
        first = min(warm_up(rank, turn), len(forwards))
        row, weights, done = forwards[:first], [Action("W", stage, i) for _, stage, i in backwards], 0
        steady, cool_down = lead(rank) if lead else (m * v, m * v)
        for number, backward in enumerate(backwards, 1):
            is_steady = first + number <= len(forwards)
            row += [forwards[first + number - 1], backward] if is_steady else [backward]
            if number - done > (steady if is_steady else cool_down):
                row.append(weights[done])
                done += 1
        rows.append(row + (weights[done:] if lead else []))
        together += forwards[first:] if in_pairs else []
    return Schedule(rows, name, loops(p, v), together)


def zb_h1(p: int, m: int) -> Schedule:
    """Build ZB-H1: no more activations than 1F1B's p micro-batches, and a third of its bubble.

    >>> print(zb_h1(3, 4))
    rank 0 | F0 F1 F2  .  . I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1 |  . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2 |  .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    A rank is idle for (p-1)(F+I-W), if W takes no longer than F or I; in 1F1B for (p-1)(F+I+W).

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1 and figure 3, top.
    """
    return _in_phases("zb_h1", p, m, 1, lambda rank, turn: p - 1 - rank, lambda rank: (rank, 0))


def zb_h2(p: int, m: int) -> Schedule:
    """Build ZB-H2: twice as many warm-up forwards, and no bubble between a rank's first action and its last.

    >>> print(zb_h2(3, 6))
    rank 0 | F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5  .  .
    rank 1 |  . F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5  .
    rank 2 |  .  . F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

    A rank is idle for (p-1)(F+I-2W), counted from its own first action to its own last: rank r begins r forwards later
    than rank 0 and ends as much later. ZB-H2 pays off if the next step begins without waiting for all ranks; otherwise
    a step takes as long as with ZB-H1. A rank holds the activations of 2p-1 micro-batches.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, sections 2.2 and 4 and figure 3, bottom.
    """
    return _in_phases("zb_h2", p, m, 1, lambda rank, turn: 2 * (p - 1 - rank), lambda rank: (2 * rank, rank))


def interleaved_zb(p: int, m: int, v: int = 2) -> Schedule:
    """Build interleaved zero bubble: interleaved 1F1B's turns of micro-batches, with ZB-H1's warm-up and W's.

    >>> print(interleaved_zb(2, 4))
    rank 0 | 0F0 0F1 2F0 2F1   . 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
    rank 1 |   . 1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3

    A rank is idle for (p-1)(F+I-W) of stages that are 1/v as large, and holds vp of their activations, or more if p
    does not divide m.

    Source: both combined, as in PyTorch's ScheduleInterleavedZeroBubble: Narayanan et al. 2021, section 2.2.2,
    and Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024.
    """
    return _in_phases(
        "interleaved_zb", p, m, v, lambda rank, turn: (v - 1) * turn + p - 1 - rank, lambda rank: (rank, 0)
    )


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

    Filling a rank takes 2p-1 micro-batches. The order of fewer is that of 2p-1 without those that do not exist.

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

    Each W belongs to the oldest I without one. The order of fewer than 2p micro-batches is that of 2p without those
    that do not exist. A rank is idle for (p-1)(F&B + B - 3W), where F&B = F + B unless a device runs both at the same
    time, and holds the activations of 2p+1 micro-batches. It sends the results of F and B when both are done, which
    costs nothing: the next F & B hides their messages. On devices that run both at once an F & B also hides the
    all-to-alls of divided experts.

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
    """A rank's row under construction."""

    def __init__(self, down: int, up: int) -> None:
        self.down, self.up = down, up
        self.actions: list[Action] = []
        self.together: set[Action] = set()  # the forwards that run as one with a backward
        # Micro-batches by kind and stage; B counts as I and W.
        self.count: Counter[tuple[str, int]] = Counter()
        self._without_w: list[int] = []  # the stages of I's, oldest first

    def add(self, steps: str, times: int = 1) -> None:
        """Add steps such as "F down, B up" or "F down & B up", each for the next micro-batch of its kind and stage."""
        parts = [step.split() for step in steps.replace("&", ", &").split(", ")]
        for part in parts * times:
            if part[0] == "&":
                self.together.add(self.actions[-1])
            kind, which = part[-2:]
            stage = self._without_w[0] if which == "oldest" else {"down": self.down, "up": self.up}[which]
            self.actions.append(Action(kind, stage, self.count["I" if kind == "B" else kind, stage]))
            if kind == "I":
                self._without_w.append(stage)
            elif kind == "W":
                self._without_w.remove(stage)
            for one in "IW" if kind == "B" else kind:
                self.count[one, stage] += 1

    def of_microbatches(self, m: int) -> list[Action]:
        """Return the actions of the first m micro-batches."""
        pairs = zip(self.actions, self.actions[1:], strict=False)
        self.together -= {f for f, b in pairs if max(f.microbatch, b.microbatch) >= m}
        return [action for action in self.actions if action.microbatch < m]
