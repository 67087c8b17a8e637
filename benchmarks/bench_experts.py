"""Expert parallelism beside a plain mixture of experts in PyTorch, step by step in the same processes.

On each of 4 ranks both sides train a GPT of 6 layers with 8 experts each (32 M parameters), 2 experts a rank, and two
experts a token. The other side is what one writes by hand in 60 lines: DistributedDataParallel for everything but the
experts, and all-to-alls of the rows with uneven parts (`PlainExperts`).

Before anything is timed, both train 3 steps to the same losses. Ratio and memory are measured as in
`benchmarks.bench_tensor`.
"""

from __future__ import annotations

from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.parallel import DistributedDataParallel

import mpkit as mk
from benchmarks.pairing import compared, compared_peaks, pairs, peak_memory
from mpkit.data import text_batches
from mpkit.models import GPT, next_token_loss
from mpkit.strategies.prepare.prepare import TrainJob, prepare
from mpkit.strategies.runtime.train import Training

RANKS, EXPERTS = 4, 8
ROUNDS, WARM_UP = 15, 3
LENGTH, BATCH = 64, 8
NAME, AGAINST = "ep", "DistributedDataParallel with all-to-alls by hand"


def model() -> GPT:
    """Build a GPT whose MLPs are 8 experts each."""
    torch.manual_seed(0)
    return GPT(layers=6, width=256, heads=4, length=LENGTH, experts=EXPERTS, top_k=2)


def adamw(params: Any) -> torch.optim.Optimizer:
    """Build the optimizer that both sides use."""
    return torch.optim.AdamW(params, lr=1e-4)


# ---------------------------------------------------------------- one side on one rank


def prepared(_: str) -> TrainJob:
    """Prepare the job for the ranks of mpkit; in `Cluster.train` the caller's process does so."""
    return prepare(
        model(), text_batches(BATCH, LENGTH, 4), mk.Plan(dp=RANKS, ep=RANKS),
        loss=next_token_loss, optimizer=adamw, steps=1000, ranks=RANKS,
    )  # fmt: skip


class PlainExperts(nn.Module):
    """This rank's experts of a layer; rows travel to them and back."""

    def __init__(self, whole: nn.Module, rank: int) -> None:
        super().__init__()
        self.here = EXPERTS // RANKS
        mine = slice(rank * self.here, (rank + 1) * self.here)
        for _, parameter in whole.named_parameters():
            parameter.data = parameter.data[mine].clone()
        self.experts = whole

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what each token's experts make of it: x [T, h], chosen and weights [T, k]."""
        order = chosen.flatten().argsort(stable=True)
        token = order // chosen.shape[1]
        sends = chosen.flatten().bincount(minlength=EXPERTS)
        receives = torch.empty_like(sends)
        dist.all_to_all_single(receives, sends)
        to, of = (counts.view(RANKS, -1).sum(1).tolist() for counts in (sends, receives))
        rows = all_to_all_single_autograd(x[token], of, to, dist.group.WORLD)
        which = torch.arange(self.here).repeat(RANKS).repeat_interleave(receives)[:, None]
        made = self.experts(rows, which, torch.ones_like(which, dtype=x.dtype))
        back = all_to_all_single_autograd(made, to, of, dist.group.WORLD)
        return torch.zeros_like(x).index_add(0, token, back * weights.flatten()[order, None])


class Theirs:
    """A rank's part of a training with PyTorch alone.

    Attributes:
        losses: the losses of the rank's share of each batch.
    """

    def __init__(self, ctx: Any) -> None:
        net = model()
        for name, module in list(net.named_modules()):
            if name.endswith("mlp.experts"):
                owner = net.get_submodule(name.rpartition(".")[0])
                owner.experts = PlainExperts(module, ctx.rank)
        own = {name: p for name, p in net.named_parameters() if ".experts." in name}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, list(own))
        self._own, self._net = list(own.values()), DistributedDataParallel(net, gradient_as_bucket_view=True)
        self._optimizer = adamw(net.parameters())
        self._batches = [
            (x[ctx.rank :: RANKS], y[ctx.rank :: RANKS]) for x, y in text_batches(BATCH, LENGTH, 4)
        ]
        self.losses: list[float] = []

    def step(self, number: int) -> None:
        """Run one training step."""
        inputs, targets = self._batches[number % len(self._batches)]
        self._optimizer.zero_grad()
        loss = next_token_loss(self._net(inputs), targets)
        loss.backward()
        for parameter in self._own:
            if parameter.grad is not None:
                parameter.grad /= RANKS  # the sum over all tokens of each rank's mean
        self.losses.append(loss.item())
        self._optimizer.step()


# ---------------------------------------------------------------- measuring


def both(ctx: Any) -> list[tuple[float, float]]:
    """Return the seconds of a step of ours and of theirs, one pair per round."""
    return pairs(Training(ctx, prepared(NAME)).step, Theirs(ctx).step, ROUNDS, WARM_UP)


def their_losses(ctx: Any, steps: int) -> list[float]:
    """Return the losses of their first steps."""
    training = Theirs(ctx)
    for number in range(steps):
        training.step(number)
    return training.losses


def check_same(cluster: mk.Cluster, steps: int = 3) -> None:
    """Check that both sides compute the same losses."""
    run = cluster.train(
        model(), text_batches(BATCH, LENGTH, 4), mk.Plan(dp=RANKS, ep=RANKS),
        loss=next_token_loss, optimizer=adamw, steps=steps,
    )  # fmt: skip
    mine = torch.tensor(run.wait().losses)
    other = torch.tensor(cluster.run(their_losses, steps)).mean(0)
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def peak(ctx: Any, name: str, side: str) -> int:
    """Return the most bytes that the allocator held on this rank."""
    if side == "theirs":
        return peak_memory(lambda: Theirs(ctx).step)
    job = cloudpickle.dumps(prepared(name))
    return peak_memory(lambda: Training(ctx, cloudpickle.loads(job)).step)


def measure() -> list[dict[str, Any]]:
    """Return the rows of the table."""
    with mk.Cluster(RANKS, device="cpu") as cluster:
        check_same(cluster)
        step = compared(f"experts: a step of ep={RANKS} on {RANKS} ranks", AGAINST, cluster.run(both))
        title = f"experts: peak memory of ep={RANKS} on {RANKS} ranks"
        return [step, compared_peaks(title, AGAINST, cluster, peak, NAME)]
