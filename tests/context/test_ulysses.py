"""Ulysses attention: that of the whole sequence, forward and backward, for heads that the ranks can divide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import mpkit as mk
from mpkit.devices.hardware import collective_time
from mpkit.strategies.comm.fake_group import FakeGroup
from mpkit.strategies.context.ulysses import ulysses_attention
from mpkit.trace import Kind
from tests.serial import EXACT

Clusters = Callable[[int], mk.Cluster]


def differentiate(attend: Callable[..., Tensor], given: list[Tensor], weights: Tensor) -> list[Tensor]:
    """The output, and the gradients of its sum with these weights."""
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


def on_a_rank(ctx: Any, given: list[Tensor], weights: Tensor, how: dict[str, Any]) -> list[Tensor]:
    mine = [tensor.chunk(ctx.world_size, 2)[ctx.rank] for tensor in (*given, weights)]
    return differentiate(lambda *qkv: ulysses_attention(*qkv, ctx.comm, **how), mine[:-1], mine[-1])


@st.composite
def shapes(draw: st.DrawFn, n: int) -> tuple[int, int, int, int, int, int]:
    """Batch, heads, heads of keys, tokens, d, e; n divides the heads, and of the heads of keys and n one the other."""
    of_keys = draw(st.sampled_from([k for k in range(1, 9) if k % n == 0 or n % k == 0]))
    heads = max(of_keys, n) * draw(st.integers(1, 2))
    return (
        draw(st.integers(1, 2)),
        heads,
        of_keys,
        n * draw(st.integers(1, 3)),
        *draw(st.tuples(st.integers(1, 4), st.integers(1, 4))),
    )


@settings(max_examples=5)
@given(
    st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), st.lists(shapes(n), min_size=1, max_size=4)))
)
def test_forward_and_backward_of_any_shape(clusters: Clusters, drawn: Any) -> None:
    n, several = drawn
    torch.manual_seed(n)
    for b, a, k, s, d, e in several:
        qkv = [torch.randn(*shape).double() for shape in ((b, a, s, d), (b, k, s, d), (b, k, s, e))]
        weights = torch.randn(b, a, s, e).double()
        for how in ({"is_causal": True}, {"scale": 0.3}):
            expected = differentiate(
                lambda *qkv, how=how: scaled_dot_product_attention(*qkv, **how, enable_gqa=True), qkv, weights
            )
            for rank, found in enumerate(clusters(n).run(on_a_rank, qkv, weights, how)):
                torch.testing.assert_close(found, [tensor.chunk(n, 2)[rank] for tensor in expected], **EXACT)


@pytest.mark.parametrize(
    ("heads", "of_keys", "n", "says"),
    [
        (4, 4, 3, "3 ranks cannot divide 4 heads: cp=2, or cp_method='ring'"),
        (6, 2, 3, "3 ranks cannot divide 6 heads and 2 of keys: cp=2"),
        (1, 1, 2, "2 ranks cannot divide 1 head: cp_method='ring'"),
    ],
)
def test_heads_that_ranks_cannot_divide(heads: int, of_keys: int, n: int, says: str) -> None:
    q, k = torch.zeros(1, heads, 4, 2), torch.zeros(1, of_keys, 4, 2)
    with pytest.raises(ValueError, match=says):
        ulysses_attention(q, k, k, FakeGroup(n))


def test_an_estimate_sends_as_much_backward_as_forward() -> None:
    """Of 32 heads of queries and 8 of keys, each of these to two of 16 ranks; four calls each way, in 32 layers."""
    machine, tokens = mk.hardware("8x8-h100-ndr"), 4096
    guess = mk.estimate(
        "llama3-8b", mk.Plan(cp=16, cp_method="ulysses", precision="bf16"), machine, global_batch=1,
        sequence=16 * tokens,
    )  # fmt: skip
    sent = tokens * (2 * 32 + 2 * 16) * 128 * 2
    once = collective_time(Kind.ALL_TO_ALL, sent, 16, 2, machine.link, machine.between, calls=4)
    assert guess.because["context parallel"] == pytest.approx(32 * 2 * once)
