"""ZeRO equals serial training, holds what the paper's formulas say, to the byte, and sends what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

import mpkit as mk
from mpkit.data import text_batches
from mpkit.devices.hardware import wire_factor
from mpkit.models import GPT, next_token_loss
from mpkit.strategies.zero import shard
from mpkit.strategies.zero.flat import Flat
from mpkit.trace import Kind
from tests.serial import Train, check_equal, serial


def plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(params: Any) -> torch.optim.Optimizer:
    """Decays matrices only: ranks have parts of one dimension, and the function is asked about whole parameters."""
    params = list(params)
    matrices = [p for p in params if p.dim() > 1]
    others = [p for p in params if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


def adagrad(params: Any) -> torch.optim.Optimizer:
    """Has states before its first step."""
    return torch.optim.Adagrad(params, lr=0.05, initial_accumulator_value=0.1)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# ---------------------------------------------------------------- the theorem, on random models and options


class Tied(nn.Module):
    """Uses another layer's weight."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.weight = other.weight
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() @ self.weight * self.scale


@st.composite
def chains(draw: st.DrawFn) -> tuple[nn.Module, int]:
    """A random chain of layers from [batch, width] to [batch, 2], and its width."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    first = width = draw(st.integers(1, 7))
    layers: list[nn.Module] = []
    kinds = ["linear", "relu", "tanh", "norm", "nested", "tied", "again", "frozen"]
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=7)):
        linears = [x for x in layers if isinstance(x, nn.Linear)]
        if kind in ("linear", "nested", "frozen"):
            wider = draw(st.integers(1, 7))
            layer: nn.Module = nn.Linear(width, wider, bias=draw(st.booleans()))
            layer.requires_grad_(kind != "frozen")
            layers.append(nn.Sequential(nn.GELU(), layer) if kind == "nested" else layer)
            width = wider
        elif kind == "tied":
            layers += [Tied(x) for x in linears[-1:] if x.in_features == width]
        elif kind == "again":  # the same layer a second time
            layers += [x for x in linears[-1:] if x.in_features == x.out_features == width]
        else:
            # ReLU works in place; not where autograd forbids it
            free = bool(layers) and isinstance(layers[-1], (nn.Linear, nn.LayerNorm))
            layers.append({"relu": nn.ReLU(free), "tanh": nn.Tanh(), "norm": nn.LayerNorm(width)}[kind])
    return nn.Sequential(*layers, nn.Linear(width, 2)).double(), first


# No shrinking: it would be hundreds of runs more.
@pytest.mark.soak
@settings(max_examples=25, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_random_models_and_options_equal_serial_training(train: Train, data: st.DataObject) -> None:
    model, width = data.draw(chains(), label="model")
    batch = data.draw(st.integers(1, 9), label="batch")
    zero = data.draw(st.integers(1, 3), label="zero")
    plan = mk.Plan(
        dp=data.draw(st.integers(1, 5), label="ranks"),
        zero=zero,
        microbatches=data.draw(st.integers(1, min(batch, 3)), label="microbatches"),
        recompute=data.draw(st.sampled_from(["none", "full"]), label="recompute"),
        bucket_mb=data.draw(st.sampled_from([1e-4, 25]), label="bucket_mb"),
        prefetch=data.draw(st.integers(0, 3), label="prefetch"),
        offload=data.draw(st.sampled_from(["none", "optimizer", "params"][: zero if zero > 1 else 2])),
    )
    batches = [(normal(batch, width), normal(batch, 2)) for _ in range(2)]
    # Adam and Adagrad take whole steps from gradients that are zero but for rounding, such as those before a norm.
    normed = any(isinstance(layer, nn.LayerNorm) for layer in model.modules())
    optimizer = data.draw(st.sampled_from([sgd] if normed else [sgd, adamw, adagrad]), label="optimizer")
    limit = data.draw(st.sampled_from([None, 0.5]), label="max_grad_norm")
    check_equal(
        train,
        model,
        batches,
        plan,
        microbatches=plan.microbatches,
        loss=F.mse_loss,
        optimizer=optimizer,
        max_grad_norm=limit,
    )


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.second(F.relu(self.first(x))), x


class NoChain(nn.Module):
    """Parts in no order, parameters of its own, an embedding whose weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 11, bias=False)
        self.blocks = nn.ModuleList(Residual(6) for _ in range(3))
        self.embedding = nn.Embedding(11, 6)
        self.embedding.weight = self.head.weight
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x, before = block(x)
            x = x * self.scale + before
        return self.head(x)


@pytest.mark.parametrize(("zero", "recompute"), [(1, "full"), (2, "none"), (3, "full")])
def test_a_model_that_is_no_chain(train: Train, zero: int, recompute: str) -> None:
    torch.manual_seed(4)
    data = [(torch.randint(11, (5, 7)), torch.randint(11, (5, 7))) for _ in range(2)]
    plan = mk.Plan.zero(zero, 3, microbatches=2, recompute=recompute)
    check_equal(train, NoChain().double(), data, plan, microbatches=2, loss=next_token_loss, optimizer=adamw)


@pytest.mark.parametrize("zero", [1, 3])
def test_parameters_of_several_dtypes(train: Train, zero: int) -> None:
    class Widen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(5, dtype=torch.float32))
            self.shift = nn.Parameter(normal(5))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale.double() + self.shift

    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 5).double(), Widen(), nn.Linear(5, 2).double())
    losses, _ = serial(model, data := [(normal(4, 3), normal(4, 2))], loss=F.mse_loss, optimizer=sgd)
    run = train(model, data, mk.Plan.zero(zero, 3), loss=F.mse_loss, optimizer=sgd, steps=5)
    assert run.losses == pytest.approx(losses, rel=1e-6)  # some of it is in float32


# ---------------------------------------------------------------- parameters without a gradient


class Spare(nn.Module):
    """Has a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_unused_parameters(train: Train, zero: int) -> None:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(3, 3), Spare(), nn.Linear(3, 2)).double()
    data = [(normal(5, 3), normal(5, 2))]
    plan = mk.Plan.zero(zero, 2, unused="allow", microbatches=2)
    check_equal(
        train, model, data, plan, microbatches=2, loss=F.mse_loss, optimizer=sgd
    )  # whose decay leaves them alone
    with pytest.raises(
        ValueError, match=r"No gradient came for 1\.spare\.weight, 1\.spare\.bias in any step"
    ):
        train(model, data, mk.Plan.zero(zero, 2), loss=F.mse_loss, optimizer=sgd)


class Sometimes(nn.Module):
    """Has a layer for samples with a positive first feature, and leaves it out where there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.positive = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, :1] > 0
        out: Tensor = self.always(x)
        return out + chosen * self.positive(x) if bool(chosen.any()) else out


class Poisons:
    """A loss that, where a rank unpickles it, lets memory of gradients begin as NaN: nobody may count on zeros."""

    def __init__(self) -> None:
        self.there = True

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if dist.is_initialized():
            original = Flat._resize

            def resize(flat: Flat, tensor: Tensor, nbytes: int) -> None:
                original(flat, tensor, nbytes)
                tensor.fill_(float("nan")) if nbytes else None

            Flat._resize = resize  # type: ignore[method-assign]


def test_parameters_that_one_replica_uses(train: Train) -> None:
    """First both use them, then one, and the other has to add zeros."""
    torch.manual_seed(8)
    model = nn.Sequential(Sometimes(), nn.Linear(3, 2)).double()
    inputs, targets = [normal(8, 3) for _ in range(2)], [normal(8, 2) for _ in range(2)]
    inputs[1][1::2, 0] = -1.0  # of the second replica
    data = list(zip(inputs, targets, strict=True))
    for zero in (1, 2):
        plan = mk.Plan.zero(zero, 2, unused="allow")
        check_equal(train, model, data, plan, loss=Poisons(), optimizer=adam, steps=4)


# ---------------------------------------------------------------- memory: section 5 of the paper, to the byte


def states(psi: int, zero: int, n: int, *, mixed: bool) -> dict[str, int]:
    """Bytes of model states a rank with Adam (Rajbhandari et al. 2020, figure 1)."""
    params, optimizer = (2 * psi, 12 * psi) if mixed else (4 * psi, 8 * psi)
    return {
        "params": params // (n if zero >= 3 else 1),
        "grads": params // (n if zero >= 2 else 1),
        "optimizer": optimizer // (n if zero >= 1 else 1),
    }


@pytest.mark.parametrize("precision", ["full", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_memory_is_what_the_formulas_say(train: Train, zero: int, precision: str) -> None:
    torch.manual_seed(7)
    # Every layer's parameters can be divided by 4: no padding.
    model = GPT(layers=2, width=16, heads=2, length=8, vocab=32)
    psi = sum(parameter.numel() for parameter in model.parameters())
    data = [(torch.randint(32, (8, 8)), torch.randint(32, (8, 8)))]
    for n, microbatches in ((2, 1),) if precision == "full" else ((4, 2),):
        plan = mk.Plan(dp=n, zero=zero, precision=precision, microbatches=microbatches)
        run = train(model, data, plan, loss=next_token_loss, optimizer=adam, steps=4)
        want = states(psi, zero, n, mixed=precision != "full")
        for step in range(1, 4):  # the first one begins without states
            for held in run.timeline().step(step).peak_memory:
                assert {name: held[name] for name in want} == want
        total = sum(want.values())
        assert total == {
            0: 16 * psi, 1: (4 + 12 / n) * psi, 2: (2 + 14 / n) * psi, 3: 16 * psi / n,
        }[zero] or precision == "full"  # fmt: skip


def test_what_is_gathered_is_there_for_a_moment(train: Train) -> None:
    """Stage 3 holds two layers' parameters and gradients at most, and between steps none."""
    torch.manual_seed(8)
    width, layers = 64, 12
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    data = [(torch.randn(4, width), torch.randn(4, width))]
    run = train(model, data, mk.Plan.zero(3, 2), loss=F.mse_loss, optimizer=adam, steps=3)
    for held in run.timeline().peak_memory:
        assert 2 * 4 * width**2 <= held["buffers"] <= 4 * 4 * width**2 < layers * 4 * width**2 / 2
    none_ahead = train(model, data, mk.Plan.zero(3, 2, prefetch=0), loss=F.mse_loss, optimizer=adam, steps=3)
    for held, ahead in zip(none_ahead.timeline().peak_memory, run.timeline().peak_memory, strict=True):
        assert held["buffers"] < ahead["buffers"]


# ---------------------------------------------------------------- volume: section 7 of the paper


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.soak), 4])
def test_volume_is_what_the_formulas_say(train: Train, zero: int, n: int) -> None:
    torch.manual_seed(9)
    model = GPT(layers=2, width=16, heads=2, length=8)
    psi = sum(parameter.numel() for parameter in model.parameters())
    run = train(
        model, text_batches(8, 8, 1), mk.Plan(dp=n, zero=zero), loss=next_token_loss, optimizer=adam, steps=3
    )
    timeline = run.timeline()
    for step in range(1, 3):
        for payload in timeline.step(step).comm_bytes:
            sent = sum(wire_factor(Kind[kind.upper()], n) * nbytes for kind, nbytes in payload.items())
            assert sent == pytest.approx(4 * psi * (3 if zero == 3 else 2) * (n - 1) / n, rel=1e-12)


def test_stages_2_and_3_reduce_every_micro_batch(train: Train) -> None:
    torch.manual_seed(10)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    psi, data = 144, [(torch.randn(8, 8), torch.randn(8, 8))]
    for zero, gathered, reduced in ((1, 1, 1), (2, 1, 4), (3, 8, 4)):
        plan = mk.Plan.zero(zero, 2, microbatches=4)
        run = train(model, data, plan, loss=F.mse_loss, optimizer=plain, steps=1)
        want = {"all_gather": gathered * 4 * psi, "reduce_scatter": reduced * 4 * psi}
        assert run.timeline().comm_bytes == [want] * 2


# ---------------------------------------------------------------- offload


@pytest.mark.parametrize(
    ("zero", "offload"), [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "params")]
)
def test_offload_copies_over_the_host_link(train: Train, zero: int, offload: str) -> None:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    psi, n, data = 3 * 65 * 64, 2, [(torch.randn(4, 64), torch.randn(4, 64))]
    plan = mk.Plan.zero(zero, n, offload=offload)
    run = train(model, data, plan, loss=F.mse_loss, optimizer=adam, steps=3)
    machine = mk.hardware("8x-h100-nvlink")
    timeline = run.timeline(hardware=machine)
    step = timeline.step(2)
    for held in step.peak_memory:
        assert held["optimizer"] == 0
        assert held["params"] == (0 if offload == "params" else 4 * psi // (n if zero == 3 else 1))
    frame = step.to_dataframe()
    copies = frame[frame["kind"].isin(["copy_to_device", "copy_to_host"])]
    assert set(copies["lane"]) == {"host"}
    # Gradients go to the host once. Parameters come back once; those that live there before each use.
    share, uses = 4 * psi // n, 2 if offload == "params" else 1
    for _, mine in copies.groupby("rank"):
        assert mine.groupby("kind")["bytes"].sum().to_dict() == {
            "copy_to_device": uses * share,
            "copy_to_host": share,
        }
    took = (copies["end"] - copies["start"]).sum()
    assert took == pytest.approx(n * (uses + 1) * share / machine.device.host, rel=1e-6)


# ---------------------------------------------------------------- overflow


@pytest.mark.parametrize("zero", [0, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    train: Train, zero: int, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(12)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    good = (torch.randn(2, 4), torch.randn(2, 2))
    # The second sample, rank 1's, has gradients that 2**16 times themselves are too large for fp16.
    bad = (good[0], torch.stack([good[1][0], torch.tensor([900.0, 900.0])]))
    plan = mk.Plan(dp=2, zero=zero, precision="fp16")
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": adam}
    nothing = train(model, [bad], plan, steps=1, **how)
    for name, value in nothing.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    assert nothing.proof.why_not.startswith("step 1 left its update out")
    assert capfd.readouterr().out.count("gradients overflowed under the loss scale 65536") == 1
    skipped = train(model, [bad, good, good], plan, steps=3, **how)
    without = train(model, [good], plan, steps=2, **how)
    for name, value in skipped.state_dict().items():
        torch.testing.assert_close(value, without.state_dict()[name], rtol=1e-2, atol=1e-3)


# ---------------------------------------------------------------- a learner's own loop


def in_fp16(ctx: Any) -> None:
    shard(ctx, nn.Linear(4, 4), precision="fp16")


def test_a_precision_is_not_ignored(clusters: Callable[[int], mk.Cluster]) -> None:
    with pytest.raises(mk.RankFailed, match=r"(?s)ValueError: shard\(precision='fp16'\).*mk.fully_shard"):
        clusters(2).run(in_fp16)


def look(ctx: Any, zero: int) -> dict[str, Any]:
    """A step by hand; what a look at parameters gives inside and outside of `gathered`."""
    torch.manual_seed(13)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    replica = shard(ctx, model, zero)
    optimizer = torch.optim.SGD([piece.held for piece in replica.pieces], lr=0.1)
    replica.begin_step()
    with replica.backward():
        model(x[ctx.rank : ctx.rank + 1]).square().sum().backward()
    replica.finish()
    optimizer.step()
    replica.renew()
    found: dict[str, Any] = {"shape": tuple(model[0].weight.shape), "repr": repr(model[0].weight)}
    with replica.gathered(), replica.gathered():
        found["weights"] = {name: value.clone() for name, value in model.state_dict().items()}
        found["outputs"] = model(x).detach()
    try:
        found["outside"] = model[0].weight.sum()
    except mk.errors.MpkitError as error:
        found["outside"] = str(error)
    return found


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_whole_parameters_inside_gathered(clusters: Callable[[int], mk.Cluster], zero: int) -> None:
    torch.manual_seed(13)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    model(x).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for found in clusters(2).run(look, zero):
        torch.testing.assert_close(found["weights"], dict(model.state_dict()))
        torch.testing.assert_close(found["outputs"], model(x).detach())
        assert found["shape"] == (8, 4)
        if zero == 3:
            assert found["outside"].startswith(
                "sum of a parameter of shape [8, 4] that is sharded: each rank"
            )
            assert "gathered" in found["repr"]


def test_a_sharded_weight_that_another_layer_uses_is_an_error_that_teaches(train: Train) -> None:
    class Peek(nn.Module):
        def __init__(self, other: nn.Linear) -> None:
            super().__init__()
            self.other = [other]  # hidden from nn.Module

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.other[0].weight

    first = nn.Linear(3, 3)
    model = nn.Sequential(first, nn.Linear(3, 3), nn.Linear(3, 3), Peek(first))
    data = [(torch.randn(4, 3), torch.randn(4, 3))]
    with pytest.raises(mk.RankFailed, match=r"of a parameter of shape \[3, 3\] that is sharded"):
        train(model, data, mk.Plan.zero(3, 2), loss=F.mse_loss, optimizer=plain)


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, torch.optim.Muon])
def test_optimizers_that_mix_elements_are_refused(
    clusters: Callable[[int], mk.Cluster], optimizer: Any
) -> None:
    model, data = nn.Sequential(nn.Linear(3, 2, bias=False)), [(torch.randn(4, 3), torch.randn(4, 2))]
    name = optimizer.__name__
    for zero in (2, 3):
        words = rf"{name} with Plan\(dp=2, zero={zero}\).*on one rank: Plan\(dp=2, zero=1\).*Plan\.ddp\(2\)"
        with pytest.raises(ValueError, match=words):
            clusters(2).train(model, data, mk.Plan.zero(zero, 2), loss=F.mse_loss, optimizer=optimizer)
