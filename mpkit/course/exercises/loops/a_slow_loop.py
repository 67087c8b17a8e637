"""Profile a slow loop.

The program below is right, and slow: for more than half of the time its accelerator has nothing to do. Mend it. What it
returns has to stay the same: the losses, the norms of the whole gradient and the final weights.

An accelerator works behind its host: the host launches operators (30 us each) and goes on, the device does them in
order (60 us each). That is fast as long as the host is ahead. Three things hold it up here:

- **Synchronization.** `.item()`, `.tolist()`, `float()`, `bool()` or `print` of a tensor wait until the device has done
  everything. Keep what you want to know as tensors, and read them once, in the end.
- **Loading.** `source.read(step)` takes 3 ms of the host. `source.start(step)` lets a worker read, and returns at
  once; `.get()` of what it returns waits for the batch. Have it read the next batch while you compute.
- **Copies** that nobody needs.

Budget, for all steps together: 4 synchronizations, copies of three times as many bytes as the model's weights have
(the optimizer makes one), at most 2 batches read ahead and not taken, and 6 ms in which the device is idle (3 of which
go before the first batch is there).

A profile says where the time goes:

```python
with Accelerator() as device:
    batches = [(torch.randn(16, 6), torch.randn(16, 3)) for _ in range(8)]
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    train(model, torch.optim.SGD(model.parameters(), 0.1), Source(batches, device), 8)
print(device)
```

On a real GPU, `torch.profiler` has the same: `aten::item` and `cudaStreamSynchronize` in the host's lane, gaps in the
GPU's.

Source: "Performance Tuning Guide" of PyTorch: asynchronous data loading, unnecessary synchronization.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen

# %% given
from mpkit.course.lab.accelerator import Accelerator, LabSource


# %% answer
def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, source: LabSource, steps: int
) -> dict[str, Any]:
    """Train for some steps; return the losses and the gradients' norms as lists of numbers, and the final weights."""
    losses, norms = [], []
    ### BEGIN SOLUTION
    # instead: snapshots = []
    # instead: for step in range(steps):
    # instead:     x, y = source.read(step)
    # instead:     loss = F.mse_loss(model(x), y)
    # instead:     optimizer.zero_grad()
    # instead:     loss.backward()
    # instead:     losses.append(loss.item())
    # instead:     norms.append(sum(p.grad.norm().item() ** 2 for p in model.parameters()) ** 0.5)
    # instead:     optimizer.step()
    # instead:     snapshots.append({name: p.detach().clone() for name, p in model.named_parameters()})
    # instead: return {"losses": losses, "norms": norms, "weights": snapshots[-1]}
    reading = source.start(0)
    for step in range(steps):
        x, y = reading.get()
        if step + 1 < steps:
            reading = source.start(step + 1)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm())
        optimizer.step()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {"losses": torch.stack(losses).tolist(), "norms": torch.stack(norms).tolist(), "weights": weights}
    ### END SOLUTION


# %% checks
STEPS, SAMPLES = 10, 16
SYNCS, COPIED, AHEAD, IDLE = "synchronizations", "bytes copied", "batches read ahead", "seconds without work"


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run the answer on an accelerator; record what it counted, for the budgets."""
    assert callable(answer)
    model = serial.model(case.seed)
    optimizer = serial.sgd(model)
    data = serial.batches(case, SAMPLES, case["steps"])
    with Accelerator() as device:
        source = LabSource(data, device)
        result = answer(model, optimizer, source, case["steps"])
    for name, amount in zip((SYNCS, COPIED, AHEAD, IDLE), _counted(device, source), strict=True):
        with ctx.record.span(name, flops=amount):
            pass
    return result


def _counted(device: Accelerator, source: LabSource) -> tuple[float, ...]:
    return device.syncs, device.copied, source.most_open, device.idle


def expected(case: Case) -> list[dict[str, object]]:
    """Return the same, of a plain loop."""
    model, data = serial.model(case.seed), serial.batches(case, SAMPLES, case["steps"])
    optimizer = serial.sgd(model)
    losses, norms = [], []
    for x, y in data:
        loss = serial.mse(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        losses.append(loss.item())
        norms.append(torch.cat([gradient.flatten() for gradient in gradients]).norm().item())
        optimizer.step()
    return [{"losses": losses, "norms": norms, "weights": serial.weights(model)}]


def counted(name: str) -> Callable[[Seen], float]:
    """Return a measure: what the accelerator has counted under a name."""

    def of(seen: Seen) -> float:
        assert seen.trace is not None
        (rank,) = seen.trace.ranks
        return float(next(op["flops"] for op in rank.ops if rank.name(int(op["name"])) == name))

    return of


SIZE = sum(parameter.nbytes for parameter in serial.model(0).parameters())
FASTER = {SYNCS: 4, COPIED: 3 * SIZE, AHEAD: 2}

EXERCISE = OnRanks(
    solution=train,
    cases=(Case(1, 1, {"steps": 10}), Case(1, 2, {"steps": 16})),
    play=play,
    expected=expected,
    result="losses, norms and weights",
    budgets=(
        *(Budget(name, counted(name), most, "bytes" * (name == COPIED)) for name, most in FASTER.items()),
        Budget(IDLE, counted(IDLE), 6e-3, "seconds"),
    ),
    after="08-your-own-program",
    place=30,
    start="Run the program as it is in the cell above, and look at the last line of the profile. Then count: "
    "how many times in a step "
    "does the program read a number?",
    mistakes=(
        Mistake(
            "reads-the-loss-in-every-step",
            (
                "Once per step the host waits until the device has done everything. In which line?",
                "Each `.item()` of a loss, and each norm that is read, stops the host. Append tensors: "
                "`loss.detach()`; and "
                "read all of them in the end, `torch.stack(losses).tolist()`.",
            ),
            [
                ("losses.append(loss.detach())", "losses.append(loss.item())"),
                ("torch.stack(losses).tolist()", "losses"),
            ],
            when=lambda seen: seen.budget == SYNCS and counted(SYNCS)(seen) <= 2 * seen.case["steps"],
        ),
        Mistake(
            "reads-a-number-per-parameter",
            (
                "How many numbers does the program read in a step?",
                "The norm of the whole gradient is the norm of the parameters' norms: "
                "`torch.stack([p.grad.norm() for p in "
                "...]).norm()`, on the device. Nothing of it has to be read before the end.",
            ),
            [
                (
                    "torch.stack([p.grad.norm() for p in model.parameters()]).norm()",
                    "sum(p.grad.norm().item() ** 2 for p in model.parameters()) ** 0.5",
                ),
                ("torch.stack(norms).tolist()", "norms"),
            ],
            when=lambda seen: seen.budget == SYNCS,
        ),
        Mistake(
            "snapshots-of-every-step",
            (
                "Which of the copies are returned?",
                "Only the last one. The weights after the last step are the model's own: look at them once, "
                "after the loop.",
            ),
            [
                (
                    "        optimizer.step()\n",
                    "        optimizer.step()\n"
                    "        snapshot = {name: p.detach().clone() for name, p in model.named_parameters()}\n",
                )
            ],
            when=lambda seen: seen.budget == COPIED,
        ),
        Mistake(
            "reads-everything-first",
            (
                "How many batches are in memory before the first step?",
                "All of them. A data set does not fit into memory: one batch ahead is enough, since reading it "
                "takes less "
                "than a step.",
            ),
            [
                (
                    "    reading = source.start(0)\n",
                    "    readings = [source.start(step) for step in range(steps)]\n",
                ),
                (
                    "reading.get()\n        if step + 1 < steps:\n            reading = source.start(step + 1)\n",
                    "readings[step].get()\n",
                ),
            ],
            when=lambda seen: seen.budget == AHEAD,
        ),
        Mistake(
            "starts-and-waits",
            (
                "You have a worker, and the loop waits for it. When does it start to read, and when do you need "
                "the batch?",
                "`source.start(step).get()` is `source.read(step)`. Start the *next* batch before you compute on this "
                "one, and get it in the next round.",
            ),
            [
                ("    reading = source.start(0)\n", ""),
                (
                    "reading.get()\n        if step + 1 < steps:\n            reading = source.start(step + 1)\n",
                    "source.start(step).get()\n",
                ),
            ],
            when=lambda seen: seen.budget == IDLE and counted(AHEAD)(seen) > 0,
        ),
        Mistake(
            "the-host-reads",
            (
                "Nothing synchronizes any more, and the device is idle still. What does the host do for 3 ms of "
                "each step?",
                "It reads a batch, and launches nothing meanwhile. Let the worker read: `source.start(step + "
                "1)` before you compute "
                "step `step`.",
            ),
            [
                ("    reading = source.start(0)\n", ""),
                (
                    "reading.get()\n        if step + 1 < steps:\n            reading = source.start(step + 1)\n",
                    "source.read(step)\n",
                ),
            ],
            when=lambda seen: seen.budget == IDLE,
        ),
        Mistake(
            "the-sum-of-norms",
            (
                "The losses are right. What is the norm of a vector that is made of several?",
                "The root of the sum of their squared norms: `torch.stack(norms_of_parameters).norm()`, not `.sum()`.",
            ),
            [("p in model.parameters()]).norm()", "p in model.parameters()]).sum()")],
        ),
    ),
    otherwise=(
        "Print the accelerator's profile: synchronizations, idle time and copies. Mend one after the other.",
    ),
)
