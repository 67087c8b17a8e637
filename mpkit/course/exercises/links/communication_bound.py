"""From how many tokens on a link is fast enough."""

from mpkit.course.author import *

# %% given
from mpkit.course.lab.timed_link import TimedLink


def one_way(link: TimedLink, nbytes: int) -> float:
    """Return the seconds of a message of so many bytes: half a ping-pong, the median of some without the first."""
    tensor, times = torch.zeros(nbytes // 4), []
    for _ in range(6):
        link.barrier()
        begin = link.clock()
        link.ping_pong(tensor)
        link.synchronize()
        times.append(link.clock() - begin)
    return sorted(times[1:])[2] / 2


# %% answer
def communication_bound(link: TimedLink, flops: float, h: int) -> dict[str, float | None]:
    """Return the numbers of tokens, "fsdp" and "tp", from which on computing takes longer than communication.

    link: its latency and bandwidth are unknown. flops: of a rank, per second. h: the width of the layers.
    None: communication takes longer, however many tokens there are.
    """
    n = link.ranks
    ### BEGIN SOLUTION
    small, large = 4096, 1_048_576
    beta = (one_way(link, large) - one_way(link, small)) / (large - small)  # seconds per byte
    alpha = one_way(link, small) - beta * small
    # FSDP: the gather of a layer against its forward
    gather = (n - 1) * (alpha + beta * 24 * h * h / n)
    fsdp = gather / (24 * h * h / flops)
    # TP: two all-reduces against an n-th of the forward, both with a part per token
    latency = 2 * 2 * (n - 1) * alpha
    travel = 2 * 2 * (n - 1) * beta * 2 * h / n
    compute = 24 * h * h / n / flops
    tp = latency / (compute - travel) if compute > travel else None
    return {"fsdp": fsdp, "tp": tp}
    ### END SOLUTION


# %% checks
def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run the answer on a link of the case's sizes."""
    link = TimedLink(ctx, case["latency"] * 1e-6, case["bandwidth"] * 1e9, seed=case.seed)
    return answer(link, case["teraflops"] * 1e12, case["h"])


def is_hidden(case: Case, how: str, tokens: float) -> bool:
    """Return whether a layer's forward takes as long as its communication, which is played round by round."""
    n, h, seconds = case.ranks, case["h"], 0.0
    parameters = 12 * h * h
    rounds, sent = (n - 1, 2 * parameters) if how == "fsdp" else (2 * 2 * (n - 1), 2 * h * tokens)
    for _ in range(rounds):
        seconds += case["latency"] * 1e-6 + sent / n / (case["bandwidth"] * 1e9)
    work = 2 * parameters * tokens / (1 if how == "fsdp" else n)
    return work / (case["teraflops"] * 1e12) >= seconds


def expected(case: Case) -> list[dict[str, float | None]]:
    """Return where communication is hidden first, by halving the interval; None if it is not for a billion tokens."""
    found: dict[str, float | None] = {}
    for how in ("fsdp", "tp"):
        low, high = 0.0, 1e9
        found[how] = None
        while is_hidden(case, how, high) and high - low > 1e-7 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if is_hidden(case, how, middle) else (middle, high)
            found[how] = high
    return [found] * case.ranks


def _case(ranks: int, latency: float, bandwidth: float, teraflops: float, h: int) -> Case:
    sizes = {"latency": latency, "bandwidth": bandwidth, "teraflops": teraflops, "h": h}
    return Case(ranks, ranks, sizes)


EXERCISE = OnRanks(
    cases=(
        _case(4, 8.0, 100.0, 100.0, 8192),
        _case(2, 5.0, 450.0, 400.0, 4096),
        _case(2, 20.0, 12.5, 100.0, 2048),
        _case(4, 3.0, 50.0, 400.0, 12288),
    )
)
