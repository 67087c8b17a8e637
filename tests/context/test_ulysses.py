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
from mpkit.models import GPT, next_token_loss
from mpkit.plan.mesh import Mesh
from mpkit.prediction.cost_model.communication import network_of
from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.comm.process_group import FakeGroup
from mpkit.strategies.context.sequence import sequence_part
from mpkit.strategies.context.ulysses import ulysses_attention
from mpkit.trace import Kind
from tests.recipes import adamw
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


def test_four_all_to_alls_of_a_part_each(clusters: Clusters) -> None:
    """Forward, and the same backward: b s h / n elements each, of which (n-1)/n leave the rank."""
    qkv = [torch.randn(2, 4, 8, 3).double() for _ in range(3)]
    clusters(4).run(on_a_rank, qkv, qkv[0], {})
    ops = clusters(4).trace.ranks[1].ops
    ops = ops[(ops["kind"] >= Kind.SEND) & (ops["kind"] < Kind.COPY_TO_DEVICE)]
    assert ops["kind"].tolist() == [Kind.ALL_TO_ALL] * 8
    assert ops["bytes"].tolist() == [2 * 4 * 8 * 3 * 8 // 4] * 8


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


def test_a_plan_that_cannot_be_is_refused_before_a_rank_starts(clusters: Clusters) -> None:
    with pytest.raises(ValueError, match=r"'contiguous'|cp=2, cp_method='ulysses'"):
        mk.Plan(cp=2, cp_method="ulysses", cp_order="zigzag")
    for name in ("all_to_all", "ulyses", "Ulysses"):
        with pytest.raises(ValueError, match=r"Plan\(cp=2, cp_method='ulysses'\)"):
            mk.Plan(cp=2, cp_method=name)
    tokens = torch.randint(9, (4, 13))
    model = GPT(vocab=9, layers=1, width=8, heads=4, length=12)
    with pytest.raises(ValueError, match="3 ranks cannot divide 4 heads"):
        clusters(3).train(
            model, [(tokens[:, :-1], tokens[:, 1:])], mk.Plan(cp=3, cp_method="ulysses"),
            loss=next_token_loss, optimizer=adamw,
        )  # fmt: skip
    with pytest.raises(ValueError, match="cannot divide 32 heads"):
        mk.estimate(
            "llama3-8b", mk.Plan(cp=64, cp_method="ulysses"), "8x8-h100-ndr", global_batch=1, sequence=8192
        )


def test_an_estimate_sends_as_much_backward_as_forward() -> None:
    """Of 32 heads of queries and 8 of keys, each of these to two of 16 ranks; four calls each way, in 32 layers."""
    machine, tokens = mk.hardware("8x8-h100-ndr"), 4096
    guess = mk.estimate(
        "llama3-8b", mk.Plan(cp=16, cp_method="ulysses", precision="bf16"), machine, global_batch=1,
        sequence=16 * tokens,
    )  # fmt: skip
    sent = tokens * (2 * 32 + 2 * 16) * 128 * 2
    once = network_of(machine).time(Kind.ALL_TO_ALL, sent, 16, 8, calls=4)
    assert guess.because["context parallel"] == pytest.approx(32 * 2 * once)


def test_on_fast_links_it_waits_less_than_a_ring() -> None:
    """It sends 4/n of b s h elements, where a ring sends 2 and hides half of them."""
    times = {
        method: mk.estimate(
            "llama2-7b", mk.Plan(cp=8, cp_method=method, precision="bf16"), "8x-h100-nvlink", global_batch=1,
            sequence=65_536,
        ).because["context parallel"]
        for method in ("ring", "ulysses")
    }  # fmt: skip
    assert times["ulysses"] < times["ring"]


# ---- Ulysses times a ring --------------------------------------------------------------------------------------------


def in_rows(ctx: Any, given: list[Tensor], weights: Tensor, how: dict[str, Any], row: int) -> list[Tensor]:
    """This rank's part, as [batch, tokens, heads, width] is cut."""
    axes = MeshAxes(ctx.comm, ctx.device, Mesh(cp=ctx.world_size, cp_ulysses=row))
    rows, ring = axes.communicator_of("cp_ulysses"), axes.communicator_of("cp_ring")
    mine = [cut(tensor, ctx.rank, ctx.world_size, how["order"], row) for tensor in (*given, weights)]
    return differentiate(lambda *qkv: ulysses_attention(*qkv, rows, ring=ring, **how), mine[:-1], mine[-1])


def cut(tensor: Tensor, rank: int, n: int, order: str, row: int) -> Tensor:
    part: Any = sequence_part(tensor.transpose(1, 2), rank, n, order, row)
    return part.transpose(1, 2).contiguous()


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    ("n", "row", "heads", "of_keys"), [(4, 2, 4, 1), (4, 2, 6, 2), (6, 2, 2, 2), (6, 3, 3, 3)]
)
def test_rows_of_ulysses_in_a_ring(
    clusters: Clusters, n: int, row: int, heads: int, of_keys: int, order: str
) -> None:
    """Forward and backward; with a head of keys for two ranks, too."""
    torch.manual_seed(n)
    s, how = 4 * n, {"is_causal": True, "scale": 0.4}
    qkv = [torch.randn(2, a, s, d).double() for a, d in ((heads, 3), (of_keys, 3), (of_keys, 2))]
    weights = torch.randn(2, heads, s, 2).double()
    expected = differentiate(
        lambda *qkv: scaled_dot_product_attention(*qkv, **how, enable_gqa=True), qkv, weights
    )
    for rank, found in enumerate(clusters(n).run(in_rows, qkv, weights, {**how, "order": order}, row)):
        wanted = [cut(tensor, rank, n, order, row) for tensor in expected]
        torch.testing.assert_close(found, wanted, **EXACT)


def test_two_degrees_in_a_plan() -> None:
    """The first is of neighbours; one of them 1 is a ring, or Ulysses, alone."""
    plan = mk.Plan(cp=8, cp_method=(2, 4), cp_order="zigzag")
    assert plan == mk.Plan.from_json(plan.to_json()) and "cp_method=(2, 4)" in repr(plan)
    assert plan.mesh.groups("cp_ulysses")[:2] == [(0, 1), (2, 3)]
    assert plan.mesh.groups("cp_ring") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert mk.Plan(cp=4, cp_method=[1, 4]) == mk.Plan(cp=4)  # type: ignore[arg-type]
    assert mk.Plan(cp=4, cp_method=(4, 1)) == mk.Plan(cp=4, cp_method="ulysses")
    for how, says in (
        ({"cp": 8, "cp_method": (2, 2)}, r"cp=8: Plan\(cp=4, .*\), or Plan\(cp=8, cp_method=\(2, 4\)\)"),
        ({"cp_method": (2, 4)}, r"cp=1: Plan\(cp=8, cp_method=\(2, 4\)\)$"),
        ({"cp": 4, "cp_method": (2, 0)}, r"whole numbers, 1 or more"),
        ({"cp": 4, "cp_method": (2, 2, 1)}, r"two degrees"),
        ({"cp": 4, "cp_method": "usp"}, r"Plan\(cp=4, cp_method=\(2, 2\)\)"),
    ):
        with pytest.raises(ValueError, match=says):
            mk.Plan(**how)


def test_two_degrees_that_a_model_refuses(clusters: Clusters) -> None:
    tokens = torch.randint(9, (4, 25))
    model = GPT(vocab=9, layers=1, width=12, heads=3, length=24)
    with pytest.raises(
        ValueError, match=r"2 ranks cannot divide 3 heads: cp_method=\(3, 2\), or cp_method='ring'"
    ):
        clusters(6).train(
            model, [(tokens[:, :-1], tokens[:, 1:])], mk.Plan(cp=6, cp_method=(2, 3)),
            loss=next_token_loss, optimizer=adamw,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"cp_method=\(32, 2\) divides them among 32, and cp_method='ring'"):
        mk.estimate(
            "llama3-8b", mk.Plan(cp=64, cp_method="ulysses"), "8x8-h100-ndr", global_batch=1, sequence=8192
        )


def test_an_estimate_of_both_has_its_ring_between_nodes() -> None:
    """8 ranks of a node divide 32 heads; a ring of 4 nodes passes on the keys of one head and hides half of it."""
    machine, tokens = mk.hardware("4x8-h100-ndr"), 4096
    guess = mk.estimate(
        "llama3-8b", mk.Plan(cp=32, cp_method=(8, 4), precision="bf16"), machine, global_batch=1,
        sequence=32 * tokens,
    )  # fmt: skip
    network = network_of(machine)
    exchanged = network.time(Kind.ALL_TO_ALL, tokens * (2 * 32 + 2 * 8) * 128 * 2, 8, 8, calls=4)
    passed = network.time(Kind.ALL_GATHER, 4 * tokens * 2 * 8 * 128 * 2, 4, 1)
    assert guess.because["context parallel"] == pytest.approx(32 * (2 * exchanged + 1.5 * passed))
