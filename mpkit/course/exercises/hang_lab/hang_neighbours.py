"""Hang: neighbours."""

from mpkit.course.author import *


# %% answer
def convolve(ctx: mk.Context, conv: nn.Conv1d, part: Tensor) -> Tensor:
    """Return this rank's part of the convolution of the whole sequence.

    conv: of width 3, without padding, equal on all ranks. part: (channels, k), this rank's columns. Returns (out, k).
    """
    before, after = (ctx.rank - 1) % ctx.world_size, (ctx.rank + 1) % ctx.world_size
    first, last = part[:, :1].contiguous(), part[:, -1:].contiguous()
    from_before, from_after = torch.empty_like(last), torch.empty_like(first)
    ### BEGIN SOLUTION
    # instead: ctx.comm.send(last, after, tag="R0")
    # instead: ctx.comm.send(first, before, tag="L0")
    # instead: ctx.comm.recv(from_before, before, tag="R0")
    # instead: ctx.comm.recv(from_after, after, tag="L0")
    sends = [ctx.comm.isend(last, after, tag="R0"), ctx.comm.isend(first, before, tag="L0")]
    ctx.comm.recv(from_before, before, tag="R0")
    ctx.comm.recv(from_after, after, tag="L0")
    for send in sends:
        send.wait()
    ### END SOLUTION
    whole: Tensor = conv(torch.cat([from_before, part, from_after], dim=1))
    return whole.detach()


# %% checks
def given(case: Case) -> tuple[nn.Conv1d, Tensor]:
    """Return a convolution and the whole sequence, the same on every rank."""
    conv = nn.Conv1d(2, 2, 3).double()
    generator = case.generator()
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return conv, torch.randn(2, 5 * case.ranks, generator=generator, dtype=torch.float64)


def inputs(case: Case, rank: int) -> tuple[nn.Conv1d, Tensor]:
    """Return the convolution, and a rank's part of the sequence."""
    conv, whole = given(case)
    return conv, whole.chunk(case.ranks, 1)[rank].contiguous()


def expected(case: Case) -> list[Tensor]:
    """Return each rank's part of the convolution of the whole sequence."""
    conv, whole = given(case)
    return list(conv(F.pad(whole, (1, 1), mode="circular")).detach().chunk(case.ranks, 1))


EXERCISE = OnRanks(
    cases=(Case(3, 1), Case(4, 2), Case(2, 3)),
    play=call_with(inputs),
    budgets=(
        Budget("collectives", collectives, 0),
        Budget("bytes that a rank sends", sent_bytes, 2 * 2 * 8, "bytes"),
    ),
)
