"""The memory of a model by strategy, beside the formulas; and what a rank that runs out of it says."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mpkit as mk
from mpkit.launch.failure import out_of_memory_text
from mpkit.prediction.experiments.by_strategy import formula, states_of
from mpkit.trace import CATEGORIES, Trace
from tests.recipes import adamw
from tests.serial import Clusters

# ---- The memory of a model by strategy, beside the formulas.


@pytest.mark.parametrize(
    ("n", "gigabytes"), [(4, (52.5, 41.3, 30)), (16, (35.6, 21.6, 7.5)), (64, (31.4, 16.6, 1.88))]
)
def test_formulas_are_the_papers(n: int, gigabytes: tuple[float, float, float]) -> None:
    """Table 1 of the ZeRO paper (Rajbhandari et al. 2020): 7.5 B parameters, mixed precision, Adam."""
    for stage, published in zip((1, 2, 3), gigabytes, strict=True):
        held = formula(mk.Plan.zero(stage, n, precision="bf16"), 7_500_000_000, itemsize=2)
        assert sum(held.values()) / 1e9 == pytest.approx(published, rel=5e-3)


def test_states_of_optimizers() -> None:
    assert states_of(adamw) == 2
    assert states_of(lambda params: torch.optim.SGD(params, lr=0.1)) == 0


# ---- A rank that runs out of memory ends with what it held, and with changes of the plan that would help

SAID = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Runs(nn.Module):
    """Passes its input on; on rank 1, or a lone rank, it runs out of memory in the given forward."""

    def __init__(self, forward: int) -> None:
        super().__init__()
        self.left = forward

    def forward(self, x: Tensor) -> Tensor:
        if dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1:
            self.left -= 1
            if self.left < 0:
                raise torch.OutOfMemoryError(SAID)
        return x


def perceptron(forward: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    return nn.Sequential(*blocks, Runs(forward))


PARAMETERS = 4 * (64 * 256 + 256 + 256 * 64 + 64)


def fails(clusters: Clusters, plan: mk.Plan, forward: int) -> mk.RankFailed:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    run = clusters(plan.ranks).train(
        perceptron(forward), [(x, x)], plan,
        loss=nn.functional.mse_loss, optimizer=torch.optim.AdamW, steps=4, show=False,
    )  # fmt: skip
    with pytest.raises(mk.RankFailed) as raised:
        run.wait()
    return raised.value


def test_the_error_ends_with_the_picture_and_a_plan(clusters: Clusters) -> None:
    """In the third step, when the optimizer's states are there."""
    error = fails(clusters, mk.Plan.ddp(2), 2)
    said = str(error)
    assert f"rank 1 of 2 failed in step 2, stage 0, micro-batch 0: OutOfMemoryError: {SAID}" in said
    assert error.memory is not None
    assert {error.memory[category] for category in ("params", "grads")} == {4 * PARAMETERS}
    assert error.memory["optimizer"] == 8 * PARAMETERS
    assert error.memory["activations"] > 16 * 256 * 4  # what the forward had saved until then
    tail = said[said.index("What rank 1 held then") :].splitlines()
    assert [line.split()[0] for line in tail[1 : 1 + len(CATEGORIES)]] == list(CATEGORIES)
    assert tail[6].split()[:2] == ["in", "all"]
    assert tail[7].startswith("Parameters, gradients and optimizer states take most of it.")
    plan = tail[7].split("What would help: ")[1].split(". mk.fits")[0]
    assert eval(plan, {"mk": mk}) == mk.Plan(dp=2, zero=1)  # it can be pasted
    assert "Traceback" not in "".join(tail)


def test_on_a_gpu_the_allocator_is_part_of_the_picture() -> None:
    """Of 24 GB, 20 are torch's, of which it keeps 6 unused; 1 GB is in no category, and 3 are not torch's."""
    picture = {
        "held": {"params": 13_000_000_000},
        "device": {"allocated": 14 * 10**9, "reserved": 20 * 10**9, "free": 10**9, "total": 24 * 10**9},
    }
    said = out_of_memory_text(0, picture, Trace([]))
    assert "torch allocated 13.0 GiB (954 MiB of it in no category" in said
    assert "keeps 5.6 GiB unused, and 2.8 GiB are CUDA's own and other programs'" in said
    assert "expandable_segments:True" in said
