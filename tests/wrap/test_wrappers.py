"""mk.ddp, mk.tensor_parallel and mk.pipeline in loops of one's own, and how such programs end."""

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.models import GPT, MLP, next_token_loss
from mpkit.trace import Kind
from tests.limits import PROGRAM
from tests.serial import Clusters

# ---- mk.ddp in a loop of one's own: equal to one process that trains on the whole batch.

sys.path.insert(0, str(Path(__file__).parent))
from loops import Branches


def in_no_sync_nothing_is_sent(ctx: Any) -> tuple[list[str], bool]:
    torch.manual_seed(ctx.rank)
    model = mk.ddp(nn.Linear(10, 5))
    kinds = []
    original = ctx.comm.wire.issue

    def issue(numbered: Any, *arguments: Any, **options: Any) -> Any:
        kinds.append(Kind(numbered.kind).name)
        return original(numbered, *arguments, **options)

    ctx.comm.wire.issue = issue
    with model.no_sync():
        model(torch.full((2, 10), float(ctx.rank))).sum().backward()
    weight = dict(model.named_parameters())["weight"]
    assert weight.grad is not None
    local = bool((weight.grad == 2 * ctx.rank).all())
    model(torch.zeros(2, 10)).sum().backward()
    assert bool((weight.grad == 1).all())  # (0 + 2) / 2
    return kinds, local


def test_no_sync_keeps_gradients_on_the_rank(clusters: Clusters) -> None:
    for kinds, local in clusters(2).run(in_no_sync_nothing_is_sent):
        assert local
        assert kinds.count("ALL_REDUCE") == 1, kinds


def forgets_a_branch(ctx: Any) -> None:
    model = mk.ddp(Branches())
    model(torch.ones(2, 10), "left").sum().backward()


def test_an_unused_parameter_is_named(clusters: Clusters) -> None:
    with pytest.raises(
        mk.RankFailed, match=r"No gradient came for right.weight.*find_unused_parameters=True in mk.ddp"
    ):
        clusters(2).run(forgets_a_branch)


def in_pairs(ctx: Any) -> list[float]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "dp"))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found = []
    for group in (mesh["dp"], pairs[ctx.rank // 2]):
        model = mk.ddp(nn.Linear(1, 1, bias=False), group=group)
        model(torch.full((1, 1), float(ctx.rank))).sum().backward()
        found += [parameter.grad.item() for parameter in model.parameters()]
    return found


def test_a_group_of_ranks(cluster: mk.Cluster) -> None:
    assert cluster.run(in_pairs) == [[0.5] * 2, [0.5] * 2, [2.5] * 2, [2.5] * 2]


MISTAKES = {
    "a context": (lambda ctx: mk.ddp(ctx), "takes a module, and was given Context"),
    "nothing to train": (lambda _: mk.ddp(nn.ReLU()), r"nothing to train \(it has no parameters\)"),
    "all frozen": (lambda _: mk.ddp(nn.Linear(2, 2).requires_grad_(False)), "all of its parameters are frozen"),
    "twice": (lambda _: mk.ddp(mk.ddp(nn.Linear(2, 2))), r"it is wrapped already.*mk.ddp\(wrapped.module\)"),
    "within": (lambda _: mk.ddp(nn.Sequential(mk.ddp(nn.Linear(2, 2)))), "0 in it is wrapped already"),
    "torch's": (lambda _: mk.ddp(nn.parallel.DistributedDataParallel(nn.Linear(2, 2))),
        "wrapped already .DistributedDataParallel"),
    "moved": (lambda _: mk.ddp(nn.Linear(2, 2)).double(), r"module.to\(...\) comes before it is wrapped"),
    "copied": (lambda _: copy.deepcopy(mk.ddp(nn.Linear(2, 2))), "cannot be copied or pickled"),
    "assign": (lambda _: mk.ddp(nn.Linear(2, 2)).load_state_dict({}, assign=True), "assign=False"),
    "a wrong group": (lambda _: mk.ddp(nn.Linear(2, 2), group=[0, 1]), "group=.* is list"),
    "an attribute": (lambda _: mk.ddp(nn.Linear(2, 2)).weigth, "has no attribute 'weigth'"),
}  # fmt: skip


def mistaken(ctx: Any) -> dict[str, str]:
    found = {}
    for name, (mistake, _) in MISTAKES.items():
        try:
            mistake(ctx)
        except (ValueError, AttributeError) as error:
            found[name] = str(error)
    return found


def test_mistakes_are_explained(clusters: Clusters) -> None:
    for found in clusters(2).run(mistaken):
        assert found.keys() == MISTAKES.keys()
        for name, (_, says) in MISTAKES.items():
            with pytest.raises(ValueError, match=says):
                raise ValueError(found[name])


def test_outside_of_a_process_group() -> None:
    with pytest.raises(ValueError, match=r"no process group.*init_process_group\(\) comes first"):
        mk.ddp(nn.Linear(2, 2))


# ---- mk.tensor_parallel and mk.pipeline in a loop of one's own.

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from loops import apart, models  # noqa: E402


def cannot_be_divided(_: Any) -> None:
    mk.tensor_parallel(nn.Bilinear(3, 3, 3))


def test_what_tensor_parallelism_cannot_divide_is_a_value_error(clusters: Clusters) -> None:
    with pytest.raises(mk.RankFailed, match="ValueError"):
        clusters(2).run(cannot_be_divided)


def staged(ctx: Any, schedule: str, options: dict[str, Any]) -> list[float]:
    module, plain = models(ctx, lambda: GPT(layers=4, width=12, heads=3))
    ids = torch.arange(64).view(8, 8)
    example = [(ids, ids), (ids[:5], ids[:5])]
    model = mk.pipeline(module, schedule, example=example, loss=next_token_loss, **options)
    optimizer, its = (torch.optim.SGD(each.parameters(), lr=0.3) for each in (model, plain))
    assert apart(model, plain) == 0
    found = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        its.zero_grad()
        batch = ids[:5] if step == 2 else ids
        for part in (batch, batch.flip(0)):  # gradients add up
            expected = next_token_loss(plain(part), part)
            expected.backward()
            found.append(abs(model.step(part, part) - expected.item()))
        norms = (torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5), model.clip_grad_norm_(0.5))
        found.append(abs(norms[0].item() - norms[1].item()))
        its.step()
        optimizer.step()
        found.append(apart(model, plain))
    state = {name: torch.full_like(value, 0.5) for name, value in plain.state_dict().items()}
    model.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "options"),
    [pytest.param("1f1b", {"microbatches": 4}, marks=pytest.mark.soak), ("zbv", {"microbatches": 4})],
)
def test_a_pipeline_equals_serial(clusters: Clusters, schedule: str, options: dict[str, Any]) -> None:
    cluster = clusters(2)
    assert max(max(found) for found in cluster.run(staged, schedule, options)) < 2e-6
    assert 0 < cluster.timeline().bubble < 1


def pipeline_mistakes(_: Any) -> list[str]:
    x, y = torch.ones(4, 2), torch.ones(4, 3)
    how: dict[str, Any] = {"example": (x, y), "loss": F.mse_loss}
    model = mk.pipeline(MLP(2, 3, width=3), **how)
    found = []
    for mistake in (
        lambda: model(x),
        lambda: model.step(torch.ones(3, 2), torch.ones(3, 3)),
        lambda: mk.pipeline(MLP(2, 3, width=3), "1f2b", **how),
        lambda: mk.pipeline(MLP(2, 3, width=3), **{**how, "loss": None}),
        lambda: mk.pipeline(nn.ReLU(), **how),
    ):
        with pytest.raises(ValueError) as caught:
            mistake()
        found.append(str(caught.value))
    return found


def test_mistakes_with_pipelines_are_explained(clusters: Clusters) -> None:
    for found in clusters(2).run(pipeline_mistakes):
        says = (
            r"loss = model.step\(inputs, targets\)", "shapes that the example had not", "1f2b",
            "the last stage computes the loss", "it has no parameters",
        )  # fmt: skip
        for message, pattern in zip(found, says, strict=True):
            with pytest.raises(ValueError, match=pattern):
                raise ValueError(message)


# ---- A program that has trained ends with exit status 0: no thread of gloo outlives the interpreter (`ends`).

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.soak
@pytest.mark.parametrize("program", ["wrappers", "ddp", "from_env", "watched"])
def test_gloos_threads_end_before_the_interpreter(program: str) -> None:
    command = [sys.executable, *TORCHRUN, str(Path(__file__).parent / "ends.py"), program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
    left = re.findall(rf"{program} ([01]): (\d+) threads\n", done.stdout)  # also amid what ranks print
    assert sorted(left) == [("0", "0"), ("1", "0")]
    assert done.stdout.count(" of 2: equal") == 2 * (program == "wrappers")
