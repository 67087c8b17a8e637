"""The references of layers divided among ranks: outputs and gradients are those of the whole layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.reference.experts.expert_parallel import expert_parallel
from mpkit.strategies.reference.experts.mixture_of_experts import mixture_of_experts
from mpkit.strategies.reference.ring_attention import ring_attention
from mpkit.strategies.reference.tensor.column_parallel_linear import column_parallel_linear
from mpkit.strategies.reference.tensor.parallel_attention import parallel_attention
from mpkit.strategies.reference.tensor.parallel_mlp import parallel_mlp
from mpkit.strategies.reference.tensor.row_parallel_linear import row_parallel_linear
from mpkit.strategies.reference.tensor.sequence_parallel import sequence_parallel_mlp
from mpkit.strategies.reference.tensor.vocabulary_cross_entropy import vocabulary_cross_entropy
from mpkit.strategies.reference.ulysses import ulysses
from mpkit.trace import Kind

Clusters = Callable[[int], mk.Cluster]


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64) for shape in shapes]


def differentiate(function: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
    """The output, and the gradients of sum(output ** 2)."""
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]


def on_ranks(
    cluster: mk.Cluster, function: Callable[..., Tensor], parts: list[list[Tensor]]
) -> list[list[Tensor]]:
    """By rank what `differentiate` finds, of that rank's parts."""
    return cluster.run(lambda ctx: differentiate(lambda *given: function(ctx, *given), *parts[ctx.rank]))


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def communicated(cluster: mk.Cluster) -> Counter[tuple[str, int]]:
    """Collectives of rank 0, by kind and payload."""
    ops = cluster.trace.ranks[0].ops
    ops = ops[(ops["kind"] >= Kind.SEND) & (ops["kind"] < Kind.COPY_TO_DEVICE)]
    return Counter((Kind(op["kind"]).name, int(op["bytes"])) for op in ops)


def test_column_parallel_linear(clusters: Clusters) -> None:
    X, A = tensors((3, 4), (4, 6))
    Y, dX, dA = differentiate(torch.matmul, X, A)
    found = on_ranks(clusters(2), column_parallel_linear, [[X, A_i] for A_i in A.chunk(2, dim=1)])
    for i, rank in enumerate(found):
        close(rank, [Y.chunk(2, dim=1)[i], dX, dA.chunk(2, dim=1)[i]])
    assert communicated(clusters(2)) == {("ALL_REDUCE", X.nbytes): 1}


def test_row_parallel_linear(clusters: Clusters) -> None:
    X, A = tensors((3, 4), (4, 6))
    Y, dX, dA = differentiate(torch.matmul, X, A)
    parts = [[X_i, A_i] for X_i, A_i in zip(X.chunk(2, dim=1), A.chunk(2), strict=True)]
    for i, rank in enumerate(on_ranks(clusters(2), row_parallel_linear, parts)):
        close(rank, [Y, dX.chunk(2, dim=1)[i], dA.chunk(2)[i]])
    assert communicated(clusters(2)) == {("ALL_REDUCE", Y.nbytes): 1}


def test_parallel_mlp(clusters: Clusters) -> None:
    X, A, B = tensors((2, 3, 4), (4, 16), (16, 4))
    Z, dX, dA, dB = differentiate(lambda X, A, B: F.gelu(X @ A) @ B, X, A, B)
    parts = [[X, A_i, B_i] for A_i, B_i in zip(A.chunk(4, dim=1), B.chunk(4), strict=True)]
    for i, rank in enumerate(on_ranks(clusters(4), parallel_mlp, parts)):
        close(rank, [Z, dX, dA.chunk(4, dim=1)[i], dB.chunk(4)[i]])
    assert communicated(clusters(4)) == {("ALL_REDUCE", X.nbytes): 2}


def test_parallel_attention(clusters: Clusters) -> None:
    b, s, h, a, t = 2, 5, 8, 4, 2
    X, W, B = tensors((b, s, h), (h, 3 * h), (h, h))

    def attention(X: Tensor, W: Tensor, B: Tensor) -> Tensor:
        Q, K, V = (part.view(b, s, a, h // a).transpose(1, 2) for part in (X @ W).chunk(3, dim=-1))
        Y = F.scaled_dot_product_attention(Q, K, V, is_causal=True)
        return Y.transpose(1, 2).reshape(b, s, h) @ B

    def columns(W: Tensor, i: int) -> Tensor:
        return torch.cat([part.chunk(t, dim=1)[i] for part in W.chunk(3, dim=1)], dim=1)

    Z, dX, dW, dB = differentiate(attention, X, W, B)

    def here(ctx: mk.Context, X: Tensor, W_i: Tensor, B_i: Tensor) -> Tensor:
        return parallel_attention(ctx, X, W_i, B_i, heads=a // t)

    parts = [[X, columns(W, i), B.chunk(t)[i]] for i in range(t)]
    for i, rank in enumerate(on_ranks(clusters(t), here, parts)):
        close(rank, [Z, dX, columns(dW, i), dB.chunk(t)[i]])
    assert communicated(clusters(t)) == {("ALL_REDUCE", X.nbytes): 2}


def test_vocabulary_cross_entropy(clusters: Clusters) -> None:
    (z,) = tensors((7, 8))
    z[0] *= 1000  # whose exponentials overflow
    y = torch.tensor([0, 3, 4, 7, 2, 5, 6])
    loss, dz = differentiate(lambda z: F.cross_entropy(z, y), z)
    found = on_ranks(
        clusters(4),
        lambda ctx, z_i: vocabulary_cross_entropy(ctx, z_i, y),
        [[z_i] for z_i in z.chunk(4, dim=1)],
    )
    for i, rank in enumerate(found):
        close(rank, [loss, dz.chunk(4, dim=1)[i]])
    assert communicated(clusters(4)) == {("ALL_REDUCE", 7 * 8): 3}


def test_sequence_parallel(clusters: Clusters) -> None:
    X, A, B = tensors((6, 2, 4), (4, 16), (16, 4))
    Z, dX, dA, dB = differentiate(lambda X, A, B: X + F.gelu(F.layer_norm(X, (4,)) @ A) @ B, X, A, B)
    parts = [[X_i, A_i, B_i] for X_i, A_i, B_i in zip(X.chunk(2), A.chunk(2, dim=1), B.chunk(2), strict=True)]
    for i, rank in enumerate(on_ranks(clusters(2), sequence_parallel_mlp, parts)):
        close(rank, [Z.chunk(2)[i], dX.chunk(2)[i], dA.chunk(2, dim=1)[i], dB.chunk(2)[i]])
    assert communicated(clusters(2)) == {("ALL_GATHER", X.nbytes): 2, ("REDUCE_SCATTER", X.nbytes): 2}


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_ring_attention(clusters: Clusters) -> None:
    b, a, s, d, c = 2, 3, 8, 4, 4
    q, k, v = tensors(*[(b, a, s, d)] * 3)
    expected = differentiate(causal_attention, q, k, v)
    parts = [[tensor.chunk(c, dim=2)[i] for tensor in (q, k, v)] for i in range(c)]
    for i, rank in enumerate(on_ranks(clusters(c), ring_attention, parts)):
        close(rank, [tensor.chunk(c, dim=2)[i] for tensor in expected])
    block = (k.nbytes + v.nbytes) // c
    assert communicated(clusters(c)) == {("SEND", block): 2 * (c - 1), ("RECV", block): 2 * (c - 1)}


def test_ulysses(clusters: Clusters) -> None:
    """Four all-to-alls of a rank's tokens forward, of q, k, v and the output, and four backward."""
    b, a, s, d, c = 2, 4, 8, 3, 4
    q, k, v = tensors(*[(b, a, s, d)] * 3)
    expected = differentiate(causal_attention, q, k, v)
    parts = [[tensor.chunk(c, dim=2)[i] for tensor in (q, k, v)] for i in range(c)]
    for i, rank in enumerate(on_ranks(clusters(c), ulysses, parts)):
        close(rank, [tensor.chunk(c, dim=2)[i] for tensor in expected])
    assert communicated(clusters(c)) == {("ALL_TO_ALL", q.nbytes // c): 8}


def moe_parts() -> tuple[list[Tensor], int]:
    """x, W, A, B of 12 tokens and 4 experts, and k."""
    return tensors((12, 6), (6, 4), (4, 6, 5), (4, 5, 6)), 2


@pytest.mark.parametrize("hot", [False, True])
def test_expert_parallelism(clusters: Clusters, hot: bool) -> None:
    """Uneven routing, and all tokens to the same two experts, so that others, and a whole rank, get none.

    One small all-to-all of the counts, and two of rows in each direction.
    """
    (x, W, A, B), k, n = moe_parts()[0], 2, 2
    if hot:
        x, W = x.abs(), torch.tensor([[9.0, 8.0, 0.0, 0.0]] * 6, dtype=torch.float64)
    expected = differentiate(lambda *g: mixture_of_experts(*g, k), x, W, A, B)
    parts = [[x.chunk(n)[i], W, A.chunk(n)[i], B.chunk(n)[i]] for i in range(n)]
    found = on_ranks(clusters(n), lambda ctx, *g: expert_parallel(ctx, *g, k), parts)
    y, dx, dA, dB = (torch.cat([rank[i] for rank in found]) for i in (0, 1, 3, 4))
    close([y, dx, found[0][2] + found[1][2], dA, dB], expected)
    sent = communicated(clusters(n))
    assert sum(sent.values()) == 5 and sent["ALL_TO_ALL", 4 * 8] == 1
    if hot:  # rank 0 sends its own rows to itself, and receives all others
        assert sent == {("ALL_TO_ALL", 32): 1, ("ALL_TO_ALL", 12 * 6 * 8): 2, ("ALL_TO_ALL", 24 * 6 * 8): 2}
