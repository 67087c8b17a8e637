"""mk.fully_shard in a loop of one's own: equal to one process that trains on the whole batch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.models import GPT
from mpkit.strategies.wrappers.divided_optimizer import check_optimizers
from mpkit.trace import Kind

sys.path.insert(0, str(Path(__file__).parent))
from loops import (
    Branches,
    Normed,
    Toy,
    adamw,
    apart,
    data,
    mine,
    models,
    momentum,
    side_by_side,
)
from test_ddp_wrapper import checkpoints

Clusters = Callable[[int], mk.Cluster]
STAGES = (1, 2, 3)


def equals_serial(ctx: Any, stages: tuple[int, ...]) -> list[float]:
    return [
        side_by_side(ctx, partial(mk.fully_shard, stage=stage), optimizer=optimizer, max_norm=norm)
        for stage in stages
        for optimizer, norm in ((momentum, None), (adamw, 0.5))
    ]


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.soak) for n in (3, 4))])
def test_equals_serial_training(clusters: Clusters, ranks: int) -> None:
    for found in clusters(ranks).run(equals_serial, STAGES if ranks == 2 else (3,)):
        assert max(found) < 1e-6, found


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def in_16_bits(ctx: Any, precision: str) -> list[Any]:
    found: list[Any] = []
    for stage in STAGES:
        far = side_by_side(ctx, partial(mk.fully_shard, stage=stage, precision=precision), optimizer=sgd)
        torch.manual_seed(0)
        model = mk.fully_shard(Toy(), stage, precision=precision)
        out = model(torch.ones(2, 10))
        (1e-6 * out.sum()).backward()  # would vanish without a scale
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = [None if p.grad is None else p.grad.as_subclass(Tensor) for p in trained]
        found.append(
            (
                far,
                out.dtype,
                {parameter.dtype for parameter in trained},
                {gradient.dtype for gradient in gradients if gradient is not None},
                all(bool((g != 0).any()) for g in gradients if g is not None and g.numel()),
                {value.dtype for value in model.state_dict().values()},
            )
        )
    return found


def test_fp16_has_fp32_master_weights_and_needs_no_scaler(clusters: Clusters) -> None:
    for found in clusters(2).run(in_16_bits, "fp16"):
        for far, out, dtypes, gradients, alive, saved in found:
            assert far < 1e-4
            assert out == torch.float32
            assert dtypes == gradients == saved == {torch.float32}
            assert alive


@pytest.mark.soak
def test_bf16_too(clusters: Clusters) -> None:
    for found in clusters(2).run(in_16_bits, "bf16"):
        assert max(far for far, *_ in found) < 2e-3


def overflows(ctx: Any) -> tuple[int, bool, float]:
    torch.manual_seed(0)
    model = mk.fully_shard(nn.Linear(4, 4), 3, precision="fp16")
    before = model.state_dict()
    optimizer = sgd(model.parameters())
    (model(torch.ones(2, 4)).sum() * (float("inf") if ctx.rank else 1.0)).backward()
    optimizer.step()
    unchanged = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    skipped = model.skipped
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return skipped, unchanged, (model.state_dict()["weight"] - before["weight"]).abs().max().item()


def test_an_overflow_on_one_rank_skips_the_step_on_all(clusters: Clusters) -> None:
    for skipped, unchanged, moved in clusters(2).run(overflows):
        assert (skipped, unchanged) == (1, True)
        assert moved == pytest.approx(0.02, rel=1e-2)


def accumulates(ctx: Any, stage: int, no_sync: bool) -> float:
    module, plain = models(ctx)
    model = mk.fully_shard(module, stage)
    x, y = data()
    optimizer, its = momentum(model.parameters()), momentum(plain.parameters())
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        its.zero_grad()
        F.mse_loss(plain(x), y).backward()
        for part_x, part_y in zip(mine(ctx, x).chunk(2), mine(ctx, y).chunk(2), strict=True):
            if no_sync:
                with model.no_sync():
                    (F.mse_loss(model(part_x), part_y) / 2).backward()
            else:
                (F.mse_loss(model(part_x), part_y) / 2).backward()
        its.step()
        optimizer.step()
        with torch.no_grad():  # between steps, also under stages that gather late
            model.eval()(x)
            model.train()
    return apart(model, plain)


def every_accumulation(ctx: Any) -> list[float]:
    return [accumulates(ctx, stage, no_sync) for stage in STAGES for no_sync in (False, True)]


def test_gradients_accumulate_until_they_are_zeroed(clusters: Clusters) -> None:
    assert max(max(found) for found in clusters(2).run(every_accumulation)) < 1e-6


def scheduled(ctx: Any, stage: int) -> float:
    module, plain = models(ctx)
    model = mk.fully_shard(module, stage)

    def grouped(of: nn.Module) -> torch.optim.Optimizer:  # by modules, as nanoGPT and others do
        linear = {
            id(p) for m in of.modules() if isinstance(m, nn.Linear) for p in m.parameters(recurse=False)
        }
        trained = [p for p in of.parameters() if p.requires_grad]
        return torch.optim.AdamW(
            [
                {"params": [p for p in trained if id(p) in linear], "weight_decay": 0.3},
                {"params": [p for p in trained if id(p) not in linear], "weight_decay": 0.0, "lr": 0.02},
            ],
            lr=0.01,
        )

    optimizer, its = grouped(model), grouped(plain)
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=8) for o in (optimizer, its)]
    x, y = data()
    for step in range(6):
        optimizer.zero_grad()
        its.zero_grad()
        F.mse_loss(plain(x), y).backward()
        F.mse_loss(model(mine(ctx, x)), mine(ctx, y)).backward()
        for each in (optimizer, its, *schedulers):
            each.step()
        if step == 3:  # a rank saves its shards' states, and goes on from them
            saved = optimizer.state_dict()
            optimizer = grouped(model)
            optimizer.load_state_dict(saved)
            schedulers[0].optimizer = optimizer
    return apart(model, plain)


def test_groups_schedulers_and_optimizer_states(clusters: Clusters) -> None:
    def every_stage(ctx: Any) -> list[float]:
        return [scheduled(ctx, stage) for stage in STAGES]

    assert max(max(found) for found in clusters(2).run(every_stage)) < 1e-6


class HeadByHand(nn.Module):
    """Uses the embedding's weight outside of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding((x[:, :3] * 3).abs().long() % 10).mean(1)
        for block in self.blocks:
            h = h + block(h)
        return F.linear(h, self.embedding.weight)[:, :5]


def every_model(ctx: Any, stage: int) -> list[float]:
    def wrap(module: nn.Module) -> nn.Module:
        return mk.fully_shard(module, stage)

    def regular(out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y)

    def in_double(module: nn.Module) -> nn.Module:
        return wrap(module)

    return [
        *(side_by_side(ctx, wrap, make, loss=regular) for make in (HeadByHand, OneLayer)),
        *checkpoints(ctx, in_double),
    ]


# ---------------------------------------------------------------- two modules, second derivatives


Wrap = Callable[[nn.Module], Any]


def two_modules(wraps: tuple[Wrap, Wrap], x: Tensor, z: Tensor) -> dict[str, Tensor]:
    """A GAN: backwards that go through both modules, or one of them, and two optimizers."""
    torch.manual_seed(0)
    generator = wraps[0](nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 10)))
    critic = wraps[1](nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizers = adamw(generator.parameters()), adamw(critic.parameters())
    for _ in range(3):
        optimizers[1].zero_grad()
        real, fake = critic(x), critic(generator(z).detach())
        (real.mean() - fake.mean() + fake.square().mean() + real.square().mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        critic(generator(z)).mean().backward()
        optimizers[0].step()
    return {f"{i}.{n}": v for i, m in enumerate((generator, critic)) for n, v in m.state_dict().items()}


def every_pair(ctx: Any) -> list[float]:
    source = torch.Generator().manual_seed(1)
    x, z = torch.randn(8, 10, generator=source), torch.randn(8, 4, generator=source)
    expected = two_modules((lambda m: m, lambda m: m), x, z)
    pairs: list[tuple[Wrap, Wrap]] = [
        (mk.ddp, mk.ddp), (mk.fully_shard, mk.ddp), (partial(mk.fully_shard, stage=1), mk.fully_shard)
    ]  # fmt: skip
    found = (two_modules(pair, mine(ctx, x), mine(ctx, z)) for pair in pairs)
    return [max((state[n] - v).abs().max().item() for n, v in expected.items()) for state in found]


def test_two_modules_in_one_backward(clusters: Clusters) -> None:
    assert max(max(found) for found in clusters(2).run(every_pair)) < 1e-6


def penalized(model: Any, x: Tensor) -> Tensor:
    """WGAN-GP: the square of the gradient with respect to the input is part of the loss."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    loss: Tensor = model(x).mean() + gradient.square().sum(1).mean()
    return loss


def second_derivatives(ctx: Any) -> list[Any]:
    found: list[Any] = []
    x, _ = data()
    for wrap in (mk.ddp, partial(mk.fully_shard, stage=1), partial(mk.fully_shard, stage=2)):
        module, plain = models(ctx, OneLayer)
        model: Any = wrap(module)
        optimizer, its = sgd(model.parameters()), sgd(plain.parameters())
        penalized(plain, x).backward()
        penalized(model, mine(ctx, x)).backward()
        its.step()
        optimizer.step()
        found.append(apart(model, plain))
    for refused in (
        lambda: penalized(mk.fully_shard(OneLayer()), x),
        lambda: mk.ddp(OneLayer())(x).sum().backward(create_graph=True),
    ):
        with pytest.raises(ValueError, match="have no graph"):
            refused()
    return found


@pytest.mark.filterwarnings("ignore:Using backward")
def test_second_derivatives_are_right_or_refused(clusters: Clusters) -> None:
    assert max(max(found) for found in clusters(2).run(second_derivatives)) < 1e-6


class OneLayer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(10, 5)


@pytest.mark.parametrize("stage", [3, *(pytest.param(s, marks=pytest.mark.soak) for s in (1, 2))])
def test_models_of_many_kinds(clusters: Clusters, stage: int) -> None:
    assert max(max(found) for found in clusters(2).run(every_model, stage)) < 1e-6


def keeps_buffers(ctx: Any, stage: int) -> list[float]:
    torch.manual_seed(ctx.rank)
    model = mk.fully_shard(Normed(), stage)
    for step in range(3):
        torch.manual_seed(10 * step + ctx.rank)
        model(torch.randn(6, 10)).sum().backward()
    model.eval()
    with torch.no_grad():
        out = model(torch.ones(1, 10))
    return [out.sum().item(), *model.state_dict()["inner.1.running_mean"].tolist()]


def test_buffers_are_the_first_ranks(clusters: Clusters) -> None:
    for stage in (2, 3):
        first, second = clusters(2).run(keeps_buffers, stage)
        assert first == second


def takes_branches(ctx: Any, stage: int) -> None:
    module, plain = models(ctx, Branches)
    model = mk.fully_shard(module, stage, find_unused_parameters=True)
    x, y = data()
    optimizer, its = momentum(model.parameters()), momentum(plain.parameters())
    for way in ("left", "right", "", "left"):
        optimizer.zero_grad()
        its.zero_grad()
        F.mse_loss(plain(x, way), y).backward()
        F.mse_loss(model(mine(ctx, x), way), mine(ctx, y)).backward()
        unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        assert unused == [name for name, parameter in plain.named_parameters() if parameter.grad is None]
        its.step()
        optimizer.step()
        assert apart(model, plain) < 1e-6


def test_parameters_that_no_rank_used_have_no_gradient(clusters: Clusters) -> None:
    for stage in STAGES:
        clusters(2).run(takes_branches, stage)


def whole(ctx: Any, stage: int, precision: str) -> dict[str, bool]:
    torch.manual_seed(ctx.rank)
    model = mk.fully_shard(Toy(), stage, precision=precision)
    torch.manual_seed(0)
    plain = Toy()
    found = {}
    state = plain.state_dict()
    found["names"] = list(model.state_dict()) == list(state)
    found["state"] = all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with model.summon_full_params():
        found["shapes"] = model.first.weight.shape == (10, 10) and model.module.last.weight.shape == (5, 7)
        with torch.no_grad():
            model.last.weight.fill_(0.5)
    found["written back"] = bool((model.state_dict()["last.weight"] == 0.5).all())
    with model.summon_full_params(writeback=False), torch.no_grad():
        model.norm.weight.clone()
    model.load_state_dict(state)
    found["loaded"] = all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    far = (model(torch.ones(3, 10)) - plain(torch.ones(3, 10))).abs().max().item()
    found["computes"] = far < (1e-6 if precision == "fp32" else 2e-3)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"fixed": state["fixed"]})
    shares = sum(parameter.numel() for parameter in model.parameters())
    found["shares"] = shares < 0.75 * sum(parameter.numel() for parameter in plain.parameters())
    found["not whole now"] = model.last.weight.shape[1:] == (1,)
    return found


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_whole_states_under_the_models_names(clusters: Clusters, precision: str) -> None:
    def every_stage(ctx: Any) -> list[dict[str, bool]]:
        return [whole(ctx, stage, precision) for stage in STAGES]

    for stages in clusters(2).run(every_stage):
        for found in stages:
            assert all(found.values()), found


def changes_by_hand(ctx: Any, stage: int) -> str:
    torch.manual_seed(0)
    model, x = mk.fully_shard(nn.Linear(4, 4), stage), torch.ones(1, 4)
    model(x).sum().backward()
    model.renew()
    before = model(x)
    saved = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():  # as an exponential moving average is swapped in
        for parameter in model.parameters():
            parameter.mul_(2.0)
    message = ""
    try:
        assert torch.allclose(model(x), 2 * before)
    except ValueError as error:
        message = str(error)
        model.renew()
        assert torch.allclose(model(x), 2 * before)
    with torch.no_grad():
        for parameter, old in zip(model.parameters(), saved, strict=True):
            parameter.copy_(old)
    model.renew()
    assert torch.allclose(model(x), before)
    return message


def test_parameters_changed_by_hand_are_not_overlooked(clusters: Clusters) -> None:
    for stage in STAGES:
        for message in clusters(2).run(changes_by_hand, stage):
            assert ("model.renew()" in message) == (stage < 3)


def trains_a_gpt(ctx: Any, stage: int) -> tuple[int, int]:
    torch.manual_seed(0)
    model = mk.fully_shard(GPT(layers=4, width=32, heads=2), stage)
    optimizer = adamw(model.parameters())
    ids = torch.randint(0, 60, (4, 8))
    for step in range(3):
        with ctx.record.step(step):
            optimizer.zero_grad()
            F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
    held = ctx.record.ledger.held
    whole = sum(value.nbytes for value in model.state_dict().values())
    return held["params"], whole


def test_the_timeline_shows_what_each_stage_sends_and_holds(clusters: Clusters) -> None:
    cluster = clusters(2)
    for stage in STAGES:
        run = cluster.run(trains_a_gpt, stage)
        ops = cluster.trace.ranks[0].ops
        kinds = {Kind(kind) for kind in ops["kind"][ops["step"] == 2]}
        assert {Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.FORWARD, Kind.BACKWARD} <= kinds
        for params, nbytes in run:
            assert params < 0.7 * nbytes if stage == 3 else params >= 0.95 * nbytes
        timeline = cluster.timeline()
        psi = timeline.comm_bytes[0]["reduce_scatter"]
        ratio = timeline.comm_bytes[0]["all_gather"] / psi
        assert ratio == pytest.approx(2 if stage == 3 else 1, rel=0.15)


MISTAKES = {
    "stage 4": (lambda: mk.fully_shard(nn.Linear(2, 2), 4), r"stage=4\): ZeRO has stage 1"),
    "stage True": (lambda: mk.fully_shard(nn.Linear(2, 2), True), "stage=True"),
    "precision": (lambda: mk.fully_shard(nn.Linear(2, 2), precision="fp8"), "there are 'fp32', 'bf16' and 'fp16'"),
    "twice": (lambda: mk.fully_shard(mk.ddp(nn.Linear(2, 2))), "wrapped already .DataParallel"),
    "ddp around it": (lambda: mk.ddp(mk.fully_shard(nn.Linear(2, 2))), "mk.fully_shard has divided the module"),
    "within it": (
        lambda: mk.fully_shard(nn.Sequential(mk.fully_shard(nn.Linear(2, 2)).module)), "take a rank's parts for"
    ),
    "around parts": (
        lambda: mk.fully_shard(mk.tensor_parallel(GPT(layers=1, width=4, heads=2))), r"mk.Plan\(dp=2, tp=2, zero=3\)"
    ),
    "no parameters": (lambda: mk.fully_shard(nn.ReLU()), "it has no parameters"),
    "a class": (lambda: mk.fully_shard(nn.Linear), "takes a module, and was given type"),
    "zero_optimizer": (
        lambda: mk.zero_optimizer(torch.optim.SGD, mk.fully_shard(nn.Linear(2, 2)).parameters(), lr=1.0),
        "was given shares of mk.fully_shard",
    ),
}  # fmt: skip


def mistaken(_: Any) -> dict[str, str]:
    found = {}
    for name, (mistake, _says) in MISTAKES.items():
        try:
            mistake()
        except ValueError as error:
            found[name] = str(error)
    return found


def test_mistakes_are_explained(clusters: Clusters) -> None:
    for found in clusters(2).run(mistaken):
        assert found.keys() == MISTAKES.keys()
        for name, (_, says) in MISTAKES.items():
            with pytest.raises(ValueError, match=says):
                raise ValueError(found[name])


def test_an_optimizer_is_tried_with_all_of_its_attributes() -> None:
    """torch's Adafactor keeps one that __getstate__ leaves out, and failed without it where torch sees a GPU."""

    class Own(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.own = 1.0

        def __getstate__(self) -> dict[str, Any]:
            return {key: value for key, value in super().__getstate__().items() if key != "own"}

        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["lr"] = 0.1 * self.own
            super().step()

    check_optimizers(Own([nn.Parameter(torch.ones(3))]), "elements", "mk.fully_shard")


def test_one_rank_is_serial_training(clusters: Clusters) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert max(clusters(1).run(equals_serial, STAGES)[0]) < 1e-7
