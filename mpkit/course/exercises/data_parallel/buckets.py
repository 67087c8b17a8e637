"""Buckets."""

from mpkit.course.author import *


# %% answer
def average_in_buckets(ctx: mk.Context, parameters: list[nn.Parameter], bucket_bytes: int) -> None:
    """Replace each `parameter.grad` by its mean over all ranks; one all-reduce per bucket, the last parameter first."""
    ### BEGIN SOLUTION
    buckets: list[list[nn.Parameter]] = []
    held = bucket_bytes  # bytes in the open bucket: none is open yet
    for parameter in reversed(parameters):
        if held >= bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(parameter)
        held += parameter.nbytes
    for bucket in buckets:
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
        ctx.comm.all_reduce(flat, op="mean")
        parts = flat.split([parameter.numel() for parameter in bucket])
        for parameter, part in zip(bucket, parts, strict=True):
            parameter.grad = part.view_as(parameter)
    ### END SOLUTION


# %% checks
WIDTHS = (6, 20, 9, 14, 5, 3)
SAMPLES = 12


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the gradients that the answer leaves after this rank's backward."""
    model = serial.model(case.seed, WIDTHS)
    x, y = serial.share(serial.batches(case, SAMPLES, 1)[0], ctx.rank, ctx.world_size)
    torch.autograd.backward(serial.mse(model(x), y))
    answer(ctx, list(model.parameters()), case["bucket_bytes"])
    return serial.gradients(model)


def expected(case: Case) -> list[object]:
    """Return the gradients of one backward over the whole batch."""
    model = serial.model(case.seed, WIDTHS)
    x, y = serial.batches(case, SAMPLES, 1)[0]
    torch.autograd.backward(serial.mse(model(x), y))
    return [serial.gradients(model)] * case.ranks


def sizes(case: Case) -> list[int]:
    """Return the bytes of the buckets, in their order."""
    totals: list[int] = []
    for parameter in reversed(list(serial.model(0, WIDTHS).parameters())):
        if not totals or totals[-1] >= case["bucket_bytes"]:
            totals.append(0)
        totals[-1] += parameter.nbytes
    return totals


def sent(seen: Seen) -> list[int]:
    """Return the bytes of rank 0's all-reduces, in their order."""
    ops = seen.ranks[0].ops
    return [int(nbytes) for nbytes in ops["bytes"][ops["kind"] == Kind.ALL_REDUCE]]


def off(seen: Seen) -> float:
    """Return how many buckets do not have the size that the rule gives."""
    right, mine = sizes(seen.case), sent(seen)
    return sum(a != b for a, b in zip(right, mine, strict=False)) + abs(len(right) - len(mine))


EXERCISE = OnRanks(
    cases=(
        Case(2, 1, {"bucket_bytes": 300}),
        Case(3, 2, {"bucket_bytes": 1200}),
        Case(4, 3, {"bucket_bytes": 1}),
        Case(2, 4, {"bucket_bytes": 10**6}),
        Case(2, 5, {"bucket_bytes": 144}),  # the bytes of the last layer: its bucket is just full
    ),
    budgets=(
        Budget("collectives", collectives, lambda case: len(sizes(case))),
        Budget(
            "largest bucket", lambda seen: max(sent(seen), default=0), lambda case: max(sizes(case)), "bytes"
        ),
        Budget("all-reduces that are not a bucket of the rule", off, 0),
    ),
)
