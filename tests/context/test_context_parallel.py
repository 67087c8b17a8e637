"""Ring attention is attention: the op on real ranks, against PyTorch's of the whole sequence."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import mpkit as mk
from mpkit.devices.hardware import collective_time
from mpkit.strategies.comm.fake_group import FakeGroup
from mpkit.strategies.context.ring import ring_attention
from mpkit.strategies.context.sequence import ORDERS, pieces
from mpkit.strategies.context.ulysses import ulysses_attention
from mpkit.trace import Kind
from mpkit.trace.record.flops import count
from tests.serial import EXACT as OF_TRAINING
from tests.serial import Clusters

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def part(tensor: Tensor, index: int, n: int, order: str) -> Tensor:
    """A rank's part of [..., s, d]."""
    chosen = pieces(index, n, order)
    cut = tensor.chunk(n * len(chosen), -2)
    return torch.cat([cut[piece] for piece in chosen], -2)


def attend(attention: Any, qkv: list[Tensor], weights: Tensor, **how: Any) -> list[Tensor]:
    """Output and gradients of a weighted sum of it."""
    q, k, v = (tensor.clone().requires_grad_() for tensor in qkv)
    out = attention(q, k, v, **how)
    (out * weights).sum().backward()
    return [out.detach(), *(tensor.grad for tensor in (q, k, v))]


def on_a_rank(ctx: Any, qkv: list[Tensor], weights: Tensor, how: dict[str, Any]) -> list[Tensor]:
    axis, order = ctx.comm, how.get("order", "contiguous")
    mine = [part(tensor, axis.index, axis.size, order) for tensor in (*qkv, weights)]
    return attend(ring_attention, mine[:3], mine[3], group=axis, **how)


def whole(qkv: list[Tensor], weights: Tensor, how: dict[str, Any]) -> list[Tensor]:
    q, k = qkv[:2]
    gqa = q.dim() == 4 and q.shape[1] != k.shape[1]
    how = {name: value for name, value in how.items() if name != "order"}
    return attend(scaled_dot_product_attention, qkv, weights, enable_gqa=gqa, **how)


def random(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


Case = tuple[list[Tensor], dict[str, Any]]


def check(cluster: mk.Cluster, several: list[Case]) -> None:
    given = [(qkv, *random((*qkv[0].shape[:-1], qkv[2].shape[-1])), how) for qkv, how in several]
    ranks = cluster.run(lambda ctx: [on_a_rank(ctx, *case) for case in given])
    for rank, of_rank in enumerate(ranks):
        for found, (qkv, weights, how) in zip(of_rank, given, strict=True):
            expected = whole(qkv, weights, how)
            mine = [part(tensor, rank, len(ranks), how.get("order", "contiguous")) for tensor in expected]
            torch.testing.assert_close(found, mine, **EXACT)


@st.composite
def cases(draw: st.DrawFn, n: int) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    order = draw(st.sampled_from(ORDERS))
    batch, heads, shared = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    unit = n * (2 if order == "zigzag" else 1)
    queries = unit * draw(st.integers(1, 3))
    causal = draw(st.booleans())
    keys = queries if causal else unit * draw(st.integers(1, 3))
    d, e = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    shapes = [(batch, heads * shared, queries, d), (batch, heads, keys, d), (batch, heads, keys, e)]
    if heads == shared == 1 and draw(st.booleans()):
        shapes = [(shape[0], *shape[2:]) for shape in shapes]  # without heads
    scale = draw(st.sampled_from([None, 0.3]))
    return shapes, {"is_causal": causal, "scale": scale, "order": order}


@settings(max_examples=5)
@given(st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), st.lists(cases(n), min_size=1, max_size=6))))
def test_forward_and_backward_of_any_shape(clusters: Clusters, drawn: Any) -> None:
    n, several = drawn
    torch.manual_seed(n)
    check(clusters(n), [(random(*shapes), how) for shapes, how in several])


class Spans(TorchDispatchMode):
    """Every tile, and every product of matrices, as a span of the trace."""

    def __init__(self, record: Any) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() != "aten::bmm" and "attention" not in func.name():
            return func(*args, **(kwargs or {}))
        with self.record.span("product"):
            return func(*args, **(kwargs or {}))


def spanned(ctx: Any, qkv: list[Tensor], weights: Tensor, how: dict[str, Any]) -> None:
    with Spans(ctx.record):
        on_a_rank(ctx, qkv, weights, how)


@pytest.mark.parametrize("order", ORDERS)
def test_the_next_block_is_under_way_while_one_is_computed(clusters: Clusters, order: str) -> None:
    n, cluster = 4, clusters(4)
    torch.manual_seed(3)
    *qkv, weights = random(*[(1, 2, 16, 4)] * 4)
    cluster.run(spanned, qkv, weights, {"is_causal": order == "zigzag", "order": order})
    messages: dict[tuple[Kind, str], list[str]] = {}
    for rank, part in enumerate(cluster.trace.ranks):
        starts = part.ops["start"]
        products = part.ops[part.ops["kind"] == Kind.COMPUTE]
        waited = {int(op["ref"]): int(op["start"]) for op in part.ops if op["kind"] == Kind.WAIT}
        seen = 0
        for i, op in enumerate(part.ops):
            if op["kind"] in (Kind.SEND, Kind.RECV):
                pair, tag = part.name(op["group"]).split("#")
                messages.setdefault((Kind(op["kind"]), pair), []).append(tag)
                within = (products["start"] > starts[i]) & (products["end"] < waited[i])
                if tag[0] == "K":
                    assert within.any(), (rank, tag)
                seen += 1
        assert seen == 2 * (n - 1 + 2 * (n - 1))
    for (kind, pair), tags in messages.items():
        # Also a backend that matches messages by their order gives each to whom it is meant for.
        assert kind == Kind.RECV or messages[Kind.RECV, pair] == tags


def flops(n: int, index: int, how: dict[str, Any], values: int = 8) -> list[float]:
    """Of a rank's forward and backward, counted without ranks and numbers."""
    q, k, v = (torch.empty(1, 1, 16 // n, d, requires_grad=True) for d in (8, 8, values))
    counted = count(partial(ring_attention, group=FakeGroup(n, index), **how), q, k, v)
    return [counted.forward, counted.backward]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "diagonal"),
    [(8, lambda c: c * (c + 1) // 2), (4, lambda c: c * c)],
    ids=["kernel", "plain operators"],
)
def test_a_dry_run_counts_what_each_rank_computes(d: int, diagonal: Callable[[int], int]) -> None:
    """The kernel of CPUs takes values that are as wide as keys, and leaves out what a causal mask hides."""

    def expected(pairs: int) -> list[float]:
        return [2 * pairs * (8 + d), 2 * pairs * (3 * 8 + 2 * d)]

    n, s = 4, 16
    assert [flops(n, i, {}, d) for i in range(n)] == [expected(s * s // n)] * n
    # Contiguous and causal: rank i looks at i blocks and at the half of its own, so the last one has most.
    c = s // n
    causal = [flops(n, i, {"is_causal": True}, d) for i in range(n)]
    assert causal == [expected(i * c * c + diagonal(c)) for i in range(n)]
    # In zigzag order everybody has the same: of the (2n)^2 tiles 2n - 1 whole ones, and two on the diagonal.
    c = s // n // 2
    zigzag = [flops(n, i, {"is_causal": True, "order": "zigzag"}, d) for i in range(n)]
    assert zigzag == [expected((2 * n - 1) * c * c + 2 * diagonal(c))] * n


@pytest.mark.parametrize(("shapes", "how", "said"), [
    ([(1, 2, 4, 3), (1, 2, 4, 5), (1, 2, 4, 5)], {}, "the same batch and width"),
    ([(1, 3, 4, 3), (1, 2, 4, 3), (1, 2, 4, 3)], {}, "have to divide those of q"),
    ([(1, 2, 4, 3), (1, 2, 6, 3), (1, 2, 6, 3)], {"is_causal": True}, "as many keys as queries"),
    ([(1, 2, 3, 3), (1, 2, 3, 3), (1, 2, 3, 3)], {"order": "zigzag"}, "even number of tokens"),
    ([(4, 3), (4, 3), (4, 3)], {}, r"\[batch, heads, time, width\], not q \[4, 3\]"),
])  # fmt: skip
def test_what_does_not_fit(shapes: list[tuple[int, ...]], how: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ring_attention(*random(*shapes), FakeGroup(2), **how)
    q, k, v = random(*[(1, 2, 4, 3)] * 3)
    with pytest.raises(ValueError, match="of one dtype"):
        ring_attention(q, k.float(), v, FakeGroup(2))


# ---- Ulysses attention: that of the whole sequence, forward and backward, for heads that the ranks can divide.


def differentiate(attend: Callable[..., Tensor], given: list[Tensor], weights: Tensor) -> list[Tensor]:
    """The output, and the gradients of its sum with these weights."""
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


def exchanged_on_a_rank(ctx: Any, given: list[Tensor], weights: Tensor, how: dict[str, Any]) -> list[Tensor]:
    mine = [tensor.chunk(ctx.world_size, 2)[ctx.rank] for tensor in (*given, weights)]
    return differentiate(lambda *qkv: ulysses_attention(*qkv, ctx.comm, **how), mine[:-1], mine[-1])


@st.composite
def shapes(draw: st.DrawFn, n: int) -> tuple[int, int, int, int, int, int]:
    """Batch, heads, heads of keys, tokens, d, e; n divides the heads, and of the heads of keys and n one the other."""
    of_keys = draw(st.sampled_from([k for k in range(1, 9) if k % n == 0 or n % k == 0]))
    heads = max(of_keys, n) * draw(st.integers(1, 2))
    return (
        draw(st.integers(1, 2)), heads, of_keys, n * draw(st.integers(1, 3)),
        *draw(st.tuples(st.integers(1, 4), st.integers(1, 4))),
    )  # fmt: skip


@pytest.mark.slow
@settings(max_examples=5)
@given(
    st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), st.lists(shapes(n), min_size=1, max_size=4)))
)
def test_ulysses_of_any_shape(clusters: Clusters, drawn: Any) -> None:
    n, several = drawn
    torch.manual_seed(n)
    for b, a, k, s, d, e in several:
        qkv = [torch.randn(*shape).double() for shape in ((b, a, s, d), (b, k, s, d), (b, k, s, e))]
        weights = torch.randn(b, a, s, e).double()
        for how in ({"is_causal": True}, {"scale": 0.3}):
            expected = differentiate(
                lambda *qkv, how=how: scaled_dot_product_attention(*qkv, **how, enable_gqa=True), qkv, weights
            )
            for rank, found in enumerate(clusters(n).run(exchanged_on_a_rank, qkv, weights, how)):
                torch.testing.assert_close(
                    found, [tensor.chunk(n, 2)[rank] for tensor in expected], **OF_TRAINING
                )


@pytest.mark.parametrize(("heads", "of_keys", "n", "says"), [
    (4, 4, 3, "3 ranks cannot divide 4 heads: cp=2, or cp_method='ring'"),
    (6, 2, 3, "3 ranks cannot divide 6 heads and 2 of keys: cp=2"),
    (1, 1, 2, "2 ranks cannot divide 1 head: cp_method='ring'"),
])  # fmt: skip
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
