"""The timelines of the reading lab, also on machines with a faster link.

Runs use tensors without content (`mpkit.prediction.dry_run`) and are replayed on catalogued machines, so they take a
second, and have the same result each time.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mpkit.devices.catalogue import hardware
from mpkit.plan.plan import Plan
from mpkit.plan.schedule.catalogue import ONE_F_ONE_B
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Trace

if TYPE_CHECKING:
    from torch import nn

    from mpkit.course.framework.room import Room
    from mpkit.devices.hardware import Hardware

__all__ = ["PUZZLES", "RUNS", "puzzle", "timeline"]

WIDTH = 4096

RUNS: dict[str, tuple[Plan, int, int, str]] = {
    "uneven": (Plan(pp=4, schedule=ONE_F_ONE_B, microbatches=8, cut=[1, 2, 5]), 6, 16384, "8x-a100-nvlink"),
    "slow link": (Plan.ddp(4), 4, 4096, "8x-h100-pcie"),
    "few micro-batches": (Plan.gpipe(4, 3), 8, 12288, "8x-a100-nvlink"),
    "offload": (Plan(dp=4, zero=1, offload="optimizer"), 4, 1024, "8x-a100-nvlink"),
    "hidden": (Plan.ddp(4), 4, 16384, "8x-a100-nvlink"),
    "ddp": (Plan.ddp(4), 3, 2048, "8x-a100-nvlink"),
    "zero 1": (Plan(dp=4, zero=1), 3, 2048, "8x-a100-nvlink"),
    "zero 2": (Plan(dp=4, zero=2), 3, 2048, "8x-a100-nvlink"),
    "zero 3": (Plan(dp=4, zero=3), 3, 2048, "8x-a100-nvlink"),
}
"""The runs by name: the plan, the number of the model's linear layers, the samples per batch, and the machine."""

PUZZLES: dict[str, tuple[str, ...]] = {
    "name-the-cause": ("few micro-batches", "slow link", "hidden", "offload", "uneven"),
    "double-the-link": ("slow link", "hidden", "few micro-batches"),
    "read-the-memory": ("zero 2", "ddp", "zero 3", "zero 1"),
}
"""The runs of an exercise, in the order of their letters. Students need not look here."""


def puzzle(exercise: str, letter: str, **more: Any) -> Timeline:
    """Return the timeline behind a letter of an exercise; `more` is passed on to `timeline`.

    >>> puzzle("double-the-link", "A")
    <Timeline of 4 ranks, 1 step, virtual: 0.02329 s, bubble 0.475>

    Args:
        exercise: the exercise.
        letter: the letter of one of the exercise's runs.
        more: arguments of `timeline`.

    Raises:
        ValueError: There is no run of that letter.
    """
    runs = dict(zip("ABCDE", PUZZLES[exercise], strict=False))
    if letter not in runs:
        raise ValueError(f"there is no run {letter!r}; there are {', '.join(sorted(runs))}")
    return timeline(runs[letter], **more)


def timeline(
    name: str, *, layers: int | None = None, link: float = 1.0, room: Room | None = None
) -> Timeline:
    """Return the last step of a run, on its machine, or on a similar one with links that many times as fast.

    >>> timeline("slow link").exposed_comm[0] > 2 * timeline("slow link", link=2).exposed_comm[0]
    True

    Args:
        name: the run, one of `RUNS`.
        layers: the number of the model's layers; None: that of the run.
        link: the factor on the bandwidth between devices.
        room: the room whose helper process runs it; None: the one that all checks share.
    """
    whole = Timeline.of(_play_run(name, layers, room), _machine(name, link))
    return whole.step(whole.steps[-1])


def _machine(name: str, link: float = 1.0) -> Hardware:
    """Return the machine of a run, its links so many times as fast; without a ramp: twice as fast takes half."""
    machine = hardware(RUNS[name][3])
    wire = machine.link
    bus = {kind: rate * link for kind, rate in wire.bus.items()}
    return replace(machine, link=replace(wire, bandwidth=wire.bandwidth * link, bus=bus, ramp=0.0))


@functools.cache
def _play_run(name: str, layers: int | None, room: Room | None) -> Trace:
    """Return the trace of two steps of a run; after its first step, DDP rebuilds its buckets."""
    import torch

    from mpkit.course.framework.room import shared_room
    from mpkit.prediction.dry_run import trace_fake

    plan, usual_layers, samples, _ = RUNS[name]
    batch = torch.empty(samples, WIDTH, device="meta")
    return trace_fake(
        functools.partial(_model, layers or usual_layers), plan, batch=(batch, batch),
        loss=torch.nn.functional.mse_loss, optimizer=torch.optim.Adam, steps=2, hardware=_machine(name),
        cluster=(room or shared_room()).cluster(1),
    )  # fmt: skip


def _model(layers: int) -> nn.Module:
    from torch import nn

    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
