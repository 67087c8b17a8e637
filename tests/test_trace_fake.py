"""A rank played alone on tensors without content does what the real one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from tests.fakes import MODEL_STATES, adamw, both, check_same, communication, sgd


def test_what_is_private_to_torch_is_there() -> None:
    """The names that fake ranks are made of; a version of torch without them fails here first."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils.flop_counter import flop_registry, shape_wrapper
    from transformers.utils.import_utils import is_fake_tensor

    with FakeTensorMode():
        assert isinstance(torch.ones(2), FakeTensor)
        assert is_fake_tensor(torch.ones(2))
        with _disable_current_modes():
            assert not isinstance(torch.ones(2), FakeTensor)
    assert FakeStore() is not None
    assert torch.ops.aten.mm in flop_registry
    assert callable(shape_wrapper)


# ---------------------------------------------------------------- equal to the real run


CASES = [
    ("mlp", mk.Plan.serial(precision="bf16")),
    ("mlp", mk.Plan.ddp(4, bucket_mb=0.001)),  # of 6 samples: 2, 2, 1, 1
    ("mlp", mk.Plan.dp(2)),
    ("mlp", mk.Plan.zero(2, 3, precision="bf16")),
    ("gpt", mk.Plan.zero(3, 2)),
    ("mlp", mk.Plan.zero(3, 2, offload="params")),
]
MORE = [
    ("gpt", mk.Plan.serial(microbatches=2)),
    ("gpt", mk.Plan.ddp(2)),
    ("mlp", mk.Plan.ddp(2, microbatches=2, unused="allow")),
    ("mlp", mk.Plan.ddp(2, precision="fp16")),
    ("mlp", mk.Plan.ddp(2, offload="optimizer")),
    ("gpt", mk.Plan.dp(3, microbatches=2)),
]


@pytest.mark.parametrize(
    ("kind", "plan"), [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE)], ids=repr
)
def test_memory_communication_and_flops_are_those_of_the_real_run(
    clusters: Callable[[int], mk.Cluster], kind: str, plan: mk.Plan
) -> None:
    real, fake = both(clusters, kind, plan, adamw)
    check_same(real, fake)
    assert np.isnan(fake.losses).all()


def test_each_rank_can_be_played_by_itself(clusters: Callable[[int], mk.Cluster]) -> None:
    rank = 2
    real, fake = both(clusters, "mlp", mk.Plan.zero(1, 3), adamw, rank=rank)
    peaks = [mk.Timeline.of(trace).peak_memory[rank] for trace in (real, fake)]
    assert [peaks[0][key] for key in MODEL_STATES] == [peaks[1][key] for key in MODEL_STATES]
    assert communication(real.ranks[rank]) == communication(fake.ranks[rank])


def test_memory_is_that_of_the_step_and_not_of_what_comes_after(
    clusters: Callable[[int], mk.Cluster],
) -> None:
    """After training ZeRO-3 gathers all weights to hand them back: not at the moment at which the step ends."""
    data = torch.empty(4, 64, device="meta"), torch.empty(4, 64, device="meta")
    fake = mk.trace_fake(
        lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), mk.Plan.zero(3, 2), batch=data,
        loss=F.mse_loss, optimizer=adamw, steps=2, cluster=clusters(1),
    )  # fmt: skip
    timeline = mk.Timeline.of(fake)
    whole = 4 * fake.meta["parameters"]
    assert timeline.peak_memory[0]["buffers"] < whole
    assert timeline.peak_memory_of_run[0]["buffers"] >= whole


@pytest.mark.soak
def test_with_batchnorm_and_clipping(clusters: Callable[[int], mk.Cluster]) -> None:
    real, fake = both(clusters, "convnet", mk.Plan.ddp(2, batchnorm="local"), sgd, max_grad_norm=0.1)
    check_same(real, fake)


@pytest.mark.parametrize("plan", [mk.Plan.pipeline("1f1b", 2, 4), mk.Plan.tp(2)], ids=repr)
def test_a_function_may_return_a_model_that_is_there(
    clusters: Callable[[int], mk.Cluster], plan: mk.Plan
) -> None:
    """Each rank gets a copy: strategies change the model that they are given."""
    model, cluster = GPT(layers=2), clusters(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    anew, once = (
        mk.trace_fake(make, plan, batch=tokens(4, 16), loss=next_token_loss, optimizer=adamw, cluster=cluster)
        for make in (lambda: GPT(layers=2), lambda: model)
    )
    assert mk.Timeline.of(once).to_dataframe().equals(mk.Timeline.of(anew).to_dataframe())
    assert mk.Timeline.of(once).peak_memory == mk.Timeline.of(anew).peak_memory
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# ---------------------------------------------------------------- at full size


def tokens(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(batch, length, dtype=torch.long, device="meta"), torch.empty(
        batch, length, dtype=torch.long, device="meta"
    )


def test_gpt2_on_64_ranks_without_its_memory(clusters: Callable[[int], mk.Cluster]) -> None:
    """GPT-2 small with 2 of its 12 layers and an untied head: in fp32 with AdamW 16 bytes per parameter."""
    trace = mk.trace_fake(
        lambda: GPT(vocab=50257, length=1024, layers=2, width=768, heads=12), mk.Plan.ddp(64),
        batch=tokens(64, 1024), loss=next_token_loss, optimizer=adamw, steps=2, cluster=clusters(1),
    )  # fmt: skip
    psi = trace.meta["parameters"]
    assert psi == 92_158_464
    timeline = mk.Timeline.of(trace)
    assert timeline.world_size == 64
    for held in (timeline.peak_memory[0], timeline.peak_memory[63]):
        assert (held["params"], held["grads"], held["optimizer"]) == (4 * psi, 4 * psi, 8 * psi)
    assert timeline.comm_bytes[7]["all_reduce"] == 4 * psi
    # What a step computes at least: 6 FLOPs a weight and token, of all weights but the embeddings (Kaplan et al. 2020).
    matrices = psi - (50257 + 1024) * 768
    assert timeline.spans["flops"][timeline.spans["rank"] == 0].sum() > 6 * matrices * 1024
    assert timeline.meta["fake"]["played"] == [0]
    assert "without content, 1 of 64 ranks" in timeline.notes[0]
    faster = mk.Timeline.of(trace, "8x8-h100-ndr")
    assert faster.step_time < timeline.step_time


@pytest.mark.soak
def test_gpt2_xl_under_zero_3_on_64_ranks(clusters: Callable[[int], mk.Cluster]) -> None:
    """GPT-2 XL (Radford et al. 2019): ZeRO-3 holds 16 psi / N bytes of model states (Rajbhandari et al. 2020)."""
    trace = mk.trace_fake(
        lambda: GPT(vocab=50257, length=1024, layers=48, width=1600, heads=25), mk.Plan.zero(3, 64, precision="bf16"),
        batch=tokens(64, 1024), loss=next_token_loss, optimizer=adamw, cluster=clusters(1),
    )  # fmt: skip
    psi = trace.meta["parameters"]
    assert psi == pytest.approx(1.638e9, rel=1e-3)
    timeline = mk.Timeline.of(trace)
    held = timeline.peak_memory[63]
    states = held["params"] + held["grads"] + held["optimizer"]
    assert 16 * psi / 64 <= states <= 16 * psi / 64 * 1.001
    # 2 psi of parameters gathered and psi of gradients reduce-scattered, 2 bytes each
    sent = timeline.comm_bytes[0]
    assert sent["all_gather"] == pytest.approx(2 * 2 * psi, rel=0.1)
    assert sent["reduce_scatter"] == pytest.approx(2 * psi, rel=1e-3)


def test_times_within_an_action_are_counted_operator_by_operator(
    clusters: Callable[[int], mk.Cluster],
) -> None:
    """Two products of 2 b n n FLOPs, each followed by something that only moves bytes."""
    b, n, one = 64, 512, mk.devices.Device("toy", {"float32": 1e9}, bandwidth=1e9)
    toy = mk.devices.Hardware("toy", one, mk.devices.Link("wire", 0.0, 1e9))
    trace = mk.trace_fake(
        lambda: nn.Sequential(nn.Linear(n, n, bias=False), nn.ReLU()), mk.Plan.serial(),
        batch=(torch.empty(b, n, device="meta"), torch.empty(b, n, device="meta")),
        loss=lambda y, t: y.sum(), optimizer=sgd, hardware=toy, cluster=clusters(1),
    )  # fmt: skip
    forward = mk.Timeline.of(trace, toy).to_dataframe().query("kind == 'forward'").iloc[0]
    product, relu = 2 * b * n * n / 1e9, 2 * b * n * 4 / 1e9
    rest = b * n * 4 / 1e9  # the sum reads what the ReLU made; scalars are nothing
    copies = 4 * b * n * 4 / 1e9  # inputs and targets to the device: read and written
    assert forward["end"] - forward["start"] == pytest.approx(product + relu + rest, abs=copies)
    with pytest.raises(ValueError, match=r"'toy', which the catalogue does not have"):
        mk.Timeline.of(trace)


# ---------------------------------------------------------------- what cannot be played


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_fn": nn.Linear(2, 2)}, "a function that makes the model"),
        ({"plan": "ddp"}, "give a Plan"),
        ({"rank": 2}, "has the ranks 0 to 1"),
        ({"hardware": "abacus"}, "none of that name"),
        ({"batch": torch.zeros(3)}, r"a pair \(inputs, targets\)"),
        ({"batch": (torch.zeros(4, 3), torch.zeros(4, 2))}, "The model refuses data of this shape"),
        ({"loss": lambda y, t: y}, "not a scalar"),
        ({"optimizer": 3}, "it is a function of parameters"),
        ({"model_fn": lambda: 3}, "model is int"),
    ],
)
def test_mistakes_are_explained(
    clusters: Callable[[int], mk.Cluster], change: dict[str, Any], words: str
) -> None:
    good: dict[str, Any] = {
        "model_fn": lambda: nn.Sequential(nn.Linear(2, 2)), "plan": mk.Plan.ddp(2),
        "batch": (torch.zeros(4, 2), torch.zeros(4, 2)), "loss": F.mse_loss, "optimizer": sgd,
        "cluster": clusters(1),
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        mk.trace_fake(**{**good, **change})
