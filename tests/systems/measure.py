"""One system: its script watched, profiled, and beside serial training."""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import mpkit as mk
from benchmarks.allocator import Peak, peak_of
from mpkit.cli.watch import CommandProgram
from mpkit.timeline.timeline import Timeline
from tests.systems.systems import Sizes, System

FOLDER = Path(__file__).parents[2] / "examples" / "systems"
NORMS = 1e-4  # of the norm of a weight, relative: Adam divides by small numbers
MEMORY = 0.03
LIMIT = 30  # seconds for a run


class Reported(NamedTuple):
    """What a script's ranks report together: the mean of their losses by step, and norms of weights by name."""

    losses: list[float]
    norms: dict[str, float]


class Measured(NamedTuple):
    """What came of a system.

    Attributes:
        timeline: of the run.
        step: of the step before the last: after the last one scripts gather the weights that they report.
        calls: communications by kind, on rank 0.
        sent: payload bytes by kind, averaged over ranks.
        expected: the same by the formula; None without one.
        profiled: by rank, the peak of torch's allocator.
        differs: the largest relative difference of a loss from serial training's, and of a weight's norm.
        compared: how many weights were compared.
    """

    timeline: Timeline
    step: Timeline
    calls: dict[str, int]
    sent: dict[str, float]
    expected: dict[str, float] | None
    profiled: list[Peak]
    differs: tuple[float, float]
    compared: int

    @property
    def memory_differs(self) -> float:
        """The relative difference of the allocator's peak, on the rank where it is largest."""
        held = [peak["total"] for peak in self.timeline.peak_memory_of_run]
        return max((peak.off(nbytes) for peak, nbytes in zip(self.profiled, held, strict=True)), key=abs)

    def wrong(self, system: System) -> list[str]:
        """Return what is not as it should be."""
        found = []
        loss, norm = self.differs
        if loss > system.rtol:
            found.append(
                f"losses differ from serial training's by {loss:.1e}, at most {system.rtol:.0e} is right"
            )
        if norm > max(NORMS, system.rtol):
            found.append(f"norms of weights differ from serial training's by {norm:.1e}")
        for kind, nbytes in (self.expected or {}).items():
            if abs(self.sent.get(kind, 0) - nbytes) > 0.005 * nbytes:
                found.append(f"{kind} of {self.sent.get(kind, 0):,.0f} bytes, by the formula {nbytes:,.0f}")
        if system.allocates and abs(self.memory_differs) > MEMORY:
            found.append(f"peak memory differs from torch.profiler's by {self.memory_differs:+.1%}")
        return found


# ---- scripts, as ranks run them


def _run(ctx: Any, system: System, folder: str) -> None:
    os.environ["REPORT"] = folder
    sys.stdout.flush()
    arguments = (system.variant,) if system.variant else ()
    CommandProgram(str(FOLDER / f"{system.script}.py"), arguments).run(ctx)


def _profiled(ctx: Any, system: System, folder: str) -> Peak:
    """Return the peak of torch's allocator while the script ran."""
    return peak_of(lambda: _run(ctx, system, folder))


def _reported(folder: str) -> Reported:
    ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    losses = [rank["losses"] for rank in ranks if rank["losses"]]
    norms: dict[str, float] = {}
    for rank in ranks:
        norms |= rank["norms"]
    return Reported([sum(step) / len(step) for step in zip(*losses, strict=True)], norms)


# ---- serial training


class Serial:
    """Serial training of each model, in this process, once."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Reported, Sizes]] = {}

    def of(self, model: str) -> tuple[Reported, Sizes]:
        """Return what `serial.py` reports, or what `Plan.ddp` yields, and the model's sizes."""
        if model == "Plan.ddp" and model not in self._known:
            self._known[model] = _plan_ddp(), self.of("tiny")[1]
        if model not in self._known:
            before, place = list(sys.argv), list(sys.path)
            with tempfile.TemporaryDirectory() as folder:
                os.environ["REPORT"] = folder
                sys.argv[1:] = [model]
                sys.path.insert(0, str(FOLDER))
                try:
                    runpy.run_path(str(FOLDER / "serial.py"), run_name="__main__")
                    sizes = _sizes(model)
                finally:
                    sys.argv[:], sys.path[:] = before, place
                    del os.environ["REPORT"]
                self._known[model] = _reported(folder), sizes
        return self._known[model]


def _plan_ddp() -> Reported:
    """Train the GPT of tiny.py on two ranks by the kit's own DDP."""
    import torch

    sys.path.insert(0, str(FOLDER))  # where tiny.py is found, by ranks too
    import tiny

    with mk.Cluster(2, device="cpu") as cluster:
        run = cluster.train(
            tiny.build(), [tiny.batch(step) for step in range(tiny.STEPS)], mk.Plan.ddp(2), loss=tiny.loss_of,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), steps=tiny.STEPS, show=False,
        ).wait()  # fmt: skip
        weights = run.state_dict()
    sys.path.remove(str(FOLDER))
    return Reported(run.losses, {name: weight.double().norm().item() for name, weight in weights.items()})


def _sizes(model: str) -> Sizes:
    import tiny

    if model == "transformers":
        import trainer

        parameters = list(trainer.build().parameters())
        return Sizes(sum(p.nbytes for p in parameters), 0, 0, 4, len(parameters))
    built = tiny.build()
    blocks = [child for child in built if isinstance(child, tiny.Block)]
    matrices = sum(p.nbytes for block in blocks for p in block.parameters() if p.dim() == 2)
    whole = sum(p.nbytes for p in built.parameters())
    return Sizes(
        whole, matrices, 4 * tiny.BATCH * tiny.TIME * tiny.WIDTH, len(blocks), len(list(built.parameters()))
    )


# ---- a system


def missing(system: System) -> list[str]:
    """Return the packages that a system needs and this environment lacks."""
    return [package for package in system.needs if find_spec(package) is None]


def measure(cluster: mk.Cluster, system: System, serial: Serial) -> Measured:
    """Watch a system's script, profile it, and compare it with serial training.

    Raises:
        RankFailed, Deadlock: the script failed.
    """
    reference, sizes = serial.of(system.model)
    with tempfile.TemporaryDirectory() as folder:
        cluster.run(_run, system, folder, watch=True, timeout=LIMIT)
        watched = _reported(folder)
    timeline = cluster.timeline()
    step = timeline.step(timeline.steps[-2])
    with tempfile.TemporaryDirectory() as folder:
        profiled = cluster.run(_profiled, system, folder, timeout=LIMIT)
        alone = _reported(folder)
    if watched != alone:
        raise AssertionError(f"watching changes the results: {watched.losses}, unwatched {alone.losses}")
    return Measured(
        timeline, step, _calls(step), _sent(step), None if system.formula is None else dict(system.formula(sizes)),
        profiled, *_compare(watched, reference),
    )  # fmt: skip


def _calls(step: Timeline) -> dict[str, int]:
    frame = step.to_dataframe()
    frame = frame[(frame["rank"] == 0) & (frame["lane"] == "comm")]
    return {str(kind): int(count) for kind, count in frame["kind"].value_counts().items()}


def _sent(step: Timeline) -> dict[str, float]:
    kinds = {kind for sent in step.comm_bytes for kind, nbytes in sent.items() if nbytes}
    return {
        kind: sum(sent.get(kind, 0) for sent in step.comm_bytes) / step.world_size for kind in sorted(kinds)
    }


def _compare(found: Reported, reference: Reported) -> tuple[tuple[float, float], int]:
    """Return the largest relative differences, of losses and of norms, and the number of weights compared."""
    if len(found.losses) != len(reference.losses):
        raise AssertionError(f"{len(found.losses)} losses, serial training has {len(reference.losses)}")
    losses = [abs(one / other - 1) for one, other in zip(found.losses, reference.losses, strict=True)]
    unknown = found.norms.keys() - reference.norms.keys()
    if unknown:
        raise AssertionError(f"weights that serial training does not know: {', '.join(sorted(unknown))}")
    norms = [abs(norm / reference.norms[name] - 1) for name, norm in found.norms.items()]
    return (max(losses), max(norms, default=0.0)), len(norms)
