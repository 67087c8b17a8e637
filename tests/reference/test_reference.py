"""The reference implementations: their parts, whole trainings, and their sources as they are shown."""

import ast
import re
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import nbformat
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.reference import bucketed_ddp, dp, hybrid_shards, naive_ddp, zero1, zero2, zero3
from mpkit.strategies.reference import stage as pipeline
from mpkit.strategies.reference.experts.expert_parallel import expert_parallel
from mpkit.strategies.reference.experts.mixture_of_experts import mixture_of_experts
from mpkit.strategies.reference.gpipe import gpipe
from mpkit.strategies.reference.naive_model_parallelism import naive_model_parallelism
from mpkit.strategies.reference.one_f_one_b import one_f_one_b
from mpkit.strategies.reference.reading import SOURCES
from mpkit.strategies.reference.ring_attention import ring_attention
from mpkit.strategies.reference.tensor.column_parallel_linear import column_parallel_linear
from mpkit.strategies.reference.tensor.parallel_attention import parallel_attention
from mpkit.strategies.reference.tensor.parallel_mlp import parallel_mlp
from mpkit.strategies.reference.tensor.row_parallel_linear import row_parallel_linear
from mpkit.strategies.reference.tensor.sequence_parallel import sequence_parallel_mlp
from mpkit.strategies.reference.tensor.vocabulary_cross_entropy import vocabulary_cross_entropy
from mpkit.strategies.reference.ulysses import ulysses
from mpkit.trace import Kind, Trace
from tests.recipes import adamw
from tests.serial import Clusters, serial

pytestmark = pytest.mark.slow

# ---- The references of layers divided among ranks: outputs and gradients are those of the whole layer.


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


# ---- The references that train: equal to serial training, and what the plan of the same name sends.

STEPS, B, LOSS = 3, 8, 8
"""Steps; samples; bytes of the loss, which a plan's last stage sends to its first, for the live view."""


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    ).double()


def batches(into: int = 6, out: int = 4) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(B, into).double(), torch.randn(B, out).double()) for _ in range(STEPS)]


def in_buckets(ctx: mk.Context, model: nn.Module, *how: Any) -> list[float]:
    """Bucketed DDP, with two buckets."""
    backwards = list(model.parameters())[::-1]
    return bucketed_ddp.train(ctx, model, *how, buckets=[backwards[:3], backwards[3:]])


def in_pairs(ctx: mk.Context, model: nn.Module, *how: Any) -> list[float]:
    """Hybrid shards, of which two ranks share each."""
    return hybrid_shards.train(ctx, model, *how, s=2)


def sent(trace: Trace) -> Counter[tuple[str, int]]:
    """How often rank 0 communicates per step, by kind and payload, but for the loss; of a plan in its last step."""
    ops = trace.ranks[0].ops
    ops = ops[(ops["kind"] >= Kind.SEND) & (ops["kind"] < Kind.COPY_TO_DEVICE) & (ops["bytes"] > LOSS)]
    last, steps = ops["step"].max(), STEPS
    if last >= 0:
        ops, steps = ops[ops["step"] == last], 1
    counted = Counter((Kind(op["kind"]).name, int(op["bytes"])) for op in ops)
    assert not any(times % steps for times in counted.values())
    return Counter({what: times // steps for what, times in counted.items()})


def payload(counted: Counter[tuple[str, int]]) -> Counter[str]:
    """Bytes by kind."""
    found: Counter[str] = Counter()
    for (kind, nbytes), times in counted.items():
        found[kind] += nbytes * times
    return found


def planned(cluster: mk.Cluster, model: nn.Module, plan: mk.Plan) -> Counter[tuple[str, int]]:
    """What the plan sends."""
    how: Any = {"loss": F.mse_loss, "optimizer": adamw, "steps": STEPS}
    return sent(cluster.train(model, batches(), plan, **how).wait().trace)


@pytest.mark.parametrize(("train", "plan"), [
    (dp.train, mk.Plan.dp(2)),
    (naive_ddp.train, mk.Plan.ddp(2)),
    (in_buckets, mk.Plan.ddp(2, bucket_mb=0.0005)),
    (zero1.train, mk.Plan.zero(1, 2)),
    (zero2.train, mk.Plan.zero(2, 2)),
    (zero3.train, mk.Plan.zero(3, 2)),
    (in_pairs, mk.Plan.zero(2, 4, dp_shard=2)),
])  # fmt: skip
def test_data_parallel(clusters: Clusters, train: Callable[..., list[float]], plan: mk.Plan) -> None:
    cluster, model = clusters(plan.ranks), mlp()
    expected, _ = serial(model, batches(), loss=F.mse_loss, optimizer=adamw, steps=STEPS)
    found = cluster.run(train, model, batches(), F.mse_loss, adamw)
    counted = sent(cluster.trace)
    losses = found[0] if train is dp.train else [mean(parts) for parts in zip(*found, strict=True)]
    assert losses == pytest.approx(expected, rel=1e-12)
    by_plan = planned(cluster, model, plan)
    assert payload(counted) == payload(by_plan)


@pytest.mark.parametrize(("schedule", "name", "m"), [
    (naive_model_parallelism, "naive", 1), (gpipe, "gpipe", 4), (one_f_one_b, "1f1b", 4),
])  # fmt: skip
def test_pipelines(clusters: Clusters, schedule: Any, name: str, m: int) -> None:
    cluster, model = clusters(4), mlp()
    expected, _ = serial(model, batches(), loss=F.mse_loss, optimizer=adamw, steps=STEPS)
    cuts = [0, 2, 4, 6, 7]
    stages = [model[a:b] for a, b in pairwise(cuts)]
    found = cluster.run(pipeline.train, schedule, stages, batches(), F.mse_loss, adamw, (B // m, 8), m)
    counted = sent(cluster.trace)
    assert found[-1] == pytest.approx(expected, rel=1e-12)
    plan = mk.Plan(pp=4, schedule=name, microbatches=m, cut=tuple(str(i) for i in cuts[1:-1]))
    assert counted == planned(cluster, model, plan)


def test_a_rank_of_1f1b_holds_what_is_under_way(clusters: Clusters) -> None:
    """Of 8 micro-batches rank s holds p - s at most; GPipe holds all."""

    def most(ctx: mk.Context, schedule: Any, stages: Any, given: Any) -> int:
        held, most = 0, 0

        def count(*_: Any) -> None:
            nonlocal held, most
            held += 1
            most = max(held, most)

        def release(*_: Any) -> None:
            nonlocal held
            held -= 1

        stage = stages[ctx.rank]
        stage.register_forward_hook(count)
        stage[0].weight.register_post_accumulate_grad_hook(release)
        pipeline.train(ctx, schedule, stages, given, F.mse_loss, adamw, boundary=(1, 8), m=8)
        return most

    model = mlp()
    stages = [model[a:b] for a, b in pairwise([0, 2, 4, 6, 7])]
    assert clusters(4).run(most, one_f_one_b, stages, batches()) == [4, 3, 2, 1]
    assert clusters(4).run(most, gpipe, stages, batches()) == [8, 8, 8, 8]


# ---- `mk.source`.

FOLDER = Path(mk.__file__).parent / "strategies" / "reference"
SHARED = {"__init__", "arguments", "reading", "serial", "stage"}
"""Modules that are no strategy."""


def test_every_reference_has_a_name_and_is_short() -> None:
    modules = {path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.py")}
    assert modules - {"__init__", "arguments", "reading", "tensor/__init__", "experts/__init__"} == set(
        SOURCES.values()
    )
    for name, module in SOURCES.items():
        text = mk.source(name)
        assert text == mk.source(module.rpartition("/")[2]) == (FOLDER / f"{module}.py").read_text()
        assert text.count("\n") <= (75 if module not in SHARED else 130), module
        doc = import_module(f"mpkit.strategies.reference.{module.replace('/', '.')}").__doc__
        assert doc is not None and ("\nSource: " in doc or "\nSources: " in doc), module


def test_phases_in_the_code_are_those_of_the_docstring_in_its_order() -> None:
    for name in SOURCES:
        text = mk.source(name)
        doc = str(ast.get_docstring(ast.parse(text)))
        comments = [line.partition("# ---- ")[2] for line in text.splitlines() if "# ---- " in line]
        phases = [comment.partition(", with")[0] for comment in comments]
        places = [doc.find(f"\n    {phase}") for phase in phases]
        assert -1 not in places and places == sorted(places), (name, phases)


def test_a_notebook_highlights_it_and_python_prints_it() -> None:
    text = mk.source("ZeRO_2")
    assert repr(text) == text and text._repr_markdown_() == f"```python\n{text}```"


def test_notebooks_show_what_is_there() -> None:
    shown = 0
    for path in (FOLDER.parents[2] / "notebooks").glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            if found := re.fullmatch(r'mk\.source\("(.+)"\)', cell.source):
                (output,) = cell.outputs
                assert output.data["text/markdown"] == mk.source(found[1])._repr_markdown_(), (
                    path.name,
                    found[1],
                )
                shown += 1
    assert shown >= 15


def test_nothing_of_the_kit_but_the_context() -> None:
    allowed = {"mpkit", "mpkit.errors"}
    for module in SOURCES.values():
        tree = ast.parse((FOLDER / f"{module}.py").read_text())
        names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        kit = {
            name
            for name in names
            if name.startswith("mpkit") and not name.startswith("mpkit.strategies.reference")
        }
        assert kit <= allowed, module


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(
        ValueError, match=r"Is mk.source\('zero-3'\) meant\? There are: serial, naive, gpipe, 1f1b"
    ):
        mk.source("zero-4")
