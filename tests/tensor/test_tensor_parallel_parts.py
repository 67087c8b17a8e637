"""What tensor parallelism is made of: operators, logits, overlap, random numbers; loops by hand, dry runs."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from mpkit.strategies.comm.fake_group import FakeGroup
from mpkit.strategies.stage.shard import evenly
from mpkit.strategies.tensor import shard_model
from mpkit.strategies.tensor.operators import f, f_bar, g, g_bar, gather, scatter
from mpkit.strategies.tensor.vocabulary import DividedLogits
from mpkit.trace import Kind
from tests.recipes import normal
from tests.serial import Clusters

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def conjugates(ctx: Any, whole: list[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each operator: what it gives for this rank's x, and the gradient of x for a dy like what it gives."""
    line, found = ctx.comm, {}
    x = whole[ctx.rank]
    part = x[:, : x.shape[1] // line.size]
    for operator, taken in [(f, x), (g, x), (f_bar, part), (g_bar, x), (scatter, x), (gather, part)]:
        leaf = taken.clone().requires_grad_()
        y = operator(line, leaf * 1)  # g writes into what it is given
        y.backward(y.detach() * (ctx.rank + 1))
        found[operator.__name__] = (y.detach(), leaf.grad)
    return found


def test_operators_and_their_conjugates(clusters: Clusters) -> None:
    torch.manual_seed(0)
    t = 3
    whole = [normal(2, 6, 4) for _ in range(t)]
    ranks = clusters(t).run(conjugates, whole)
    total = sum(whole)
    joined = torch.cat([x[:, :2] for x in whole], 1)

    def of(i: int, x: Tensor) -> Tensor:
        return x[:, 2 * i : 2 * i + 2]

    def weigh(values: list[Tensor]) -> Tensor:
        return sum(value * (i + 1) for i, value in enumerate(values))

    for i, found in enumerate(ranks):
        expected = {
            "f": (whole[i], weigh(whole)),
            "g": (total, total * (i + 1)),
            "f_bar": (joined, of(i, weigh([joined] * t))),
            "g_bar": (of(i, total), torch.cat([of(j, total) * (j + 1) for j in range(t)], 1)),
            "scatter": (of(i, whole[i]), torch.cat([of(j, whole[j]) * (j + 1) for j in range(t)], 1)),
            "gather": (joined, of(i, joined) * (i + 1)),
        }
        for name, (y, dx) in expected.items():
            torch.testing.assert_close(found[name], (y, dx), **EXACT, msg=lambda m, n=name: f"{n}: {m}")


def divided(line: Any, whole: Tensor) -> tuple[DividedLogits, Tensor]:
    parts = tuple(evenly(whole.shape[-1], line.size))
    mine = parts[line.index]
    leaf = whole[..., mine.start : mine.stop].clone().requires_grad_()
    return DividedLogits.make(line, parts, leaf * 1), leaf


def losses_on_a_rank(ctx: Any, whole: Tensor, losses: list[Any]) -> Any:
    found = []
    for loss in losses:
        logits, leaf = divided(ctx.comm, whole)
        value = loss(logits)
        assert type(value) is Tensor
        value.backward()
        found.append((value.detach(), leaf.grad))
    return found


def check_losses(clusters: Clusters, t: int, whole: Tensor, *losses: Any) -> None:
    ranks = clusters(t).run(losses_on_a_rank, whole, list(losses))
    for i, loss in enumerate(losses):
        leaf = whole.clone().requires_grad_()
        value = loss(leaf)
        value.backward()
        for rank in ranks:
            torch.testing.assert_close(rank[i][0], value.detach(), **EXACT, equal_nan=True)
        gradient = torch.cat([rank[i][1] for rank in ranks], -1)
        torch.testing.assert_close(gradient, leaf.grad, **EXACT, equal_nan=True)


@settings(max_examples=4)
@given(st.data())
def test_cross_entropy_of_parts(clusters: Clusters, data: st.DataObject) -> None:
    t = data.draw(st.integers(2, 3))
    vocab, rows = data.draw(st.integers(t, 9)), data.draw(st.integers(1, 5))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    whole = normal(rows, vocab) * 10 ** data.draw(st.integers(0, 3))
    targets = torch.randint(vocab, (rows,))
    ignored = data.draw(st.sampled_from([-100, 0, vocab - 1]))
    if ignored < 0:
        targets[: data.draw(st.integers(0, rows))] = ignored
    check_losses(
        clusters,
        t,
        whole,
        lambda z: F.cross_entropy(z, targets, ignore_index=ignored),
        lambda z: F.cross_entropy(z, targets, ignore_index=ignored, reduction="sum"),
        lambda z: F.cross_entropy(z, targets, ignore_index=ignored, reduction="none").sin().sum(),
    )


def test_any_other_loss_sees_the_whole_logits(clusters: Clusters) -> None:
    torch.manual_seed(1)
    whole, targets = normal(2, 3, 7), torch.randint(7, (2, 3))
    weight = torch.rand(7, dtype=torch.float64)
    check_losses(
        clusters,
        3,
        whole,
        lambda z: F.cross_entropy(z.transpose(1, 2), targets),
        lambda z: F.cross_entropy(z.flatten(0, 1), targets.flatten(), label_smoothing=0.1),
        lambda z: F.cross_entropy(input=z.flatten(0, 1), target=targets.flatten(), weight=weight),
        lambda z: F.cross_entropy(z.view(6, 7), whole.softmax(-1).view(6, 7)),  # probabilities as targets
        lambda z: F.nll_loss(F.log_softmax(z, -1).view(-1, 7), targets.view(-1)),
        lambda z: (z / 2 + 1)[..., 2:].logsumexp(-1).sum(),
        lambda z: (z[0] * z[1]).sum() + torch.stack([z, z]).max(),
        lambda z: z.view(-1).square().sum() + z[:, :, 0].sum(),
        lambda z: (z - z.mean(-1, keepdim=True)).pow(2).mean(),
        lambda z: -z.log_softmax(-1).gather(-1, targets[..., None]).sum(),
    )


SIZES: dict[str, int] = {"layers": 2, "width": 12, "heads": 3, "vocab": 20, "length": 6}
BATCH = 2


def forward_and_backward(ctx: Any, model: nn.Module, tokens: Tensor, how: Any) -> None:
    """Recorded, with a span where each weight's gradient is made."""
    shard_model(model, ctx.comm, **how)

    def made(name: str) -> Callable[[Tensor], None]:
        def mark(_: Tensor) -> None:
            with ctx.record.span(f"dW {name}"):
                pass

        return mark

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(made(name))
    with ctx.record.span("forward"):
        loss = next_token_loss(model(tokens), tokens)
    with ctx.record.span("backward"):
        loss.backward()


def story(cluster: mk.Cluster) -> list[tuple[str, int, str]]:
    """Kind, bytes and name of each op of rank 0, in order; a wait's bytes are the number of what it waits for."""
    part = cluster.trace.ranks[0]
    return [
        (
            Kind(op["kind"]).word,
            int(op["ref"] if op["kind"] == Kind.WAIT else op["bytes"]),
            part.names[op["name"]],
        )
        for op in part.ops
    ]


@pytest.mark.parametrize("sequence", [False, True])
def test_the_sum_of_dx_travels_while_dw_is_computed(clusters: Clusters, sequence: bool) -> None:
    torch.manual_seed(4)
    model = GPT(**SIZES).double()
    tokens = torch.randint(SIZES["vocab"], (BATCH, SIZES["length"]))
    clusters(2).run(forward_and_backward, model, tokens, {"sequence": sequence})
    ops = story(clusters(2))
    kind = "reduce_scatter" if sequence else "all_reduce"
    for layer in range(SIZES["layers"]):
        for column in ("attention.qkv", "mlp.up"):
            names = [f"dW block{layer}.{column}.{name}" for name in ("weight", "bias")]
            made = [i for i, op in enumerate(ops) if op[2] in names]
            started = max(i for i in range(made[0]) if ops[i][0] == kind)
            waited = next(i for i, op in enumerate(ops) if op[:2] == ("wait", started))
            assert len(made) == 2 and started < made[0] and made[-1] < waited
            if sequence:  # x comes while dx is computed, and so before the sum of dx starts
                assert any(op[0] == "all_gather" for op in ops[started - 3 : started])


def test_what_is_kept_for_the_backward() -> None:
    # Korthikanti et al. 2022: of the 34 s b h bytes per layer, 10 are not in a region: the inputs of two layer norms
    # and of two regions (8), and two masks (none here, without dropout). Tensor parallelism divides the others by t,
    # and sequence parallelism all.
    b, s, h, t = 2, 16, 64, 2
    model = GPT(layers=1, width=h, heads=2, vocab=8, length=s).to(torch.bfloat16)

    def kept(model: nn.Module, *, parts: int = 1) -> int:
        """Bytes that a block's forward saves; weights, and what is a number a token, apart."""
        known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            place = tensor.untyped_storage().data_ptr()
            if place not in known and tensor.nbytes > b * s * h // parts // 4:
                storages[place] = tensor
            return tensor

        x = torch.randn(b, s // parts, h, dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.block0.mlp(model.block0.norm2(model.block0.attention(model.block0.norm1(x))))
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

    whole, outside = kept(model), 8 * b * s * h
    shares = copy.deepcopy(model)
    shard_model(shares, FakeGroup(t))
    assert kept(shares) == outside + (whole - outside) / t
    shares = copy.deepcopy(model)
    sharded = shard_model(shares, FakeGroup(t), sequence=True)
    assert sharded.plan.sequence == ("block0", "head.norm")
    entered: list[weakref.ref[Tensor]] = []  # by the regions, as whole sequences
    for region in (shares.block0.attention.qkv, shares.block0.mlp.up):
        region.register_forward_pre_hook(lambda _, x: entered.append(weakref.ref(x[0])))
    assert kept(shares, parts=t) == whole / t
    assert [x() for x in entered] == [None, None]
