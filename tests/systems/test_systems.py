"""Programs of other systems (examples/systems), watched: each trains as one process does, sends what the papers say,
and holds what torch's allocator does.

A formula gives the payload by kind of communication, in bytes per rank and step; P are the bytes of the parameters, x
those of the activations between two blocks (of the whole batch). A system that is not installed is left out:
scripts/systems.sh installs all.
"""

import json
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch

import mpkit as mk
from benchmarks.allocator import Peak, peak_of
from mpkit.cli.watch import CommandProgram
from tests.serial import Clusters

FOLDER = Path(__file__).parents[2] / "examples" / "systems"
SCRIPTS = {path.stem for path in FOLDER.glob("*.py")} - {"tiny", "serial"}


class Sizes(NamedTuple):
    P: int
    matrices: int  # bytes of those in blocks, which tensor parallelism divides
    x: int
    blocks: int
    parameters: int  # tensors


Formula = Callable[[Sizes], Mapping[str, float]]
Reported = tuple[
    list[float], dict[str, float]
]  # the mean of the ranks' losses by step, norms of weights by name


def ddp(s: Sizes) -> dict[str, float]:
    return {"all_reduce": s.P}


def zero3(s: Sizes) -> dict[str, float]:
    return {"all_gather": 2 * s.P, "reduce_scatter": s.P}


def gathered_once(s: Sizes) -> dict[str, float]:
    return {"all_gather": s.P, "reduce_scatter": s.P}


def zero1(s: Sizes) -> dict[str, float]:
    return {"all_reduce": s.P, "all_gather": s.P}


def megatron(s: Sizes) -> dict[str, float]:
    """Two all-reduces in a block's forward, two in its backward."""
    return {"all_reduce": 4 * s.x * s.blocks}


def sequence(s: Sizes) -> dict[str, float]:
    """Each all-reduce in two halves; x is gathered for the head, as logits, and where the embedding ends (backward)."""
    return {"all_gather": (4 * s.blocks + 3) * s.x, "reduce_scatter": (4 * s.blocks + 1) * s.x}


def two_dimensions(s: Sizes) -> dict[str, float]:
    """Over tp Megatron's, of half of the batch; over dp ZeRO-3's, of the parameters that a tp rank has."""
    held = s.P - s.matrices / 2
    return {"all_reduce": 4 * s.x / 2 * s.blocks, "all_gather": 2 * held, "reduce_scatter": held}


def pipeline(boundaries: int) -> Formula:
    """Messages of one of two ranks: at each boundary x is sent or received in the forward, and in the backward."""
    return lambda s: {"send": boundaries * s.x, "recv": boundaries * s.x}


SYSTEMS: dict[str, Formula] = {
    "ddp": ddp,
    "ddp static": ddp,
    "ddp unused": lambda s: {"all_reduce": s.P + 4 * s.parameters},
    "ddp hook": ddp,
    "ddp fp16": lambda s: {"all_reduce": s.P / 2},
    "ddp compiled": ddp,
    "fsdp1": zero3,
    "fsdp1 zero2": gathered_once,
    "fsdp2": zero3,
    "fsdp2 keep": gathered_once,
    "fsdp2 offload": zero3,
    "zero_optimizer": lambda s: {"all_reduce": s.P, "broadcast": s.P},
    "tensor_parallel": sequence,
    "tensor_parallel whole": megatron,
    "pipelining gpipe": pipeline(1),
    "pipelining 1f1b": pipeline(1),
    "pipelining interleaved": pipeline(3),
    "pipelining zbv": pipeline(2),
    "fsdp2_tensor_parallel": two_dimensions,
    "checkpoint": zero3,
    "ring": lambda s: {"send": s.P, "recv": s.P},
    "accelerated": ddp,
    "trainer": ddp,
    "deepspeed_zero 1": zero1,
    "deepspeed_zero 2": zero1,
    "deepspeed_zero 3": zero3,
    "lightning_ddp": ddp,
    "mirrored": ddp,
}
NEEDS = {
    "accelerated": "accelerate", "trainer": "accelerate", "deepspeed_zero": "deepspeed",
    "lightning_ddp": "pytorch_lightning", "mirrored": "tensorflow",
}  # fmt: skip
MODEL = {
    "ddp unused": "unused",
    "trainer": "transformers",
    "mirrored": "Plan.ddp",
}  # what serial.py trains; "tiny"
RANKS = {"fsdp2_tensor_parallel": 4, "mirrored": 1}


def test_every_script_is_watched_and_knows_nothing_of_mpkit() -> None:
    assert {name.split()[0] for name in SYSTEMS} == SCRIPTS
    for script in SCRIPTS - {"mirrored"}:  # TensorFlow's says what it does
        assert "mpkit" not in (FOLDER / f"{script}.py").read_text(), script


def run(ctx: Any, name: str, folder: str) -> None:
    os.environ["REPORT"] = folder
    script, *arguments = name.split()
    CommandProgram(str(FOLDER / f"{script}.py"), tuple(arguments)).run(ctx)


def profiled(ctx: Any, name: str, folder: str) -> Peak:
    return peak_of(lambda: run(ctx, name, folder))


def reported(folder: str) -> Reported:
    ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    losses = [rank["losses"] for rank in ranks if rank["losses"]]
    norms = {name: norm for rank in ranks for name, norm in rank["norms"].items()}
    return [sum(step) / len(step) for step in zip(*losses, strict=True)], norms


@cache
def serial(model: str) -> tuple[Reported, Sizes]:
    """What serial.py reports of a model, trained in this process, and the model's sizes."""
    before, place = list(sys.argv), list(sys.path)
    with TemporaryDirectory() as folder:
        os.environ["REPORT"] = folder
        sys.argv[1:] = [model]
        sys.path.insert(0, str(FOLDER))
        try:
            runpy.run_path(str(FOLDER / "serial.py"), run_name="__main__")
            return reported(folder), sizes(model)
        finally:
            sys.argv[:], sys.path[:] = before, place
            del os.environ["REPORT"]


def sizes(model: str) -> Sizes:
    import tiny

    if model == "transformers":
        import trainer

        weights = list(trainer.build().parameters())
        return Sizes(sum(p.nbytes for p in weights), 0, 0, 4, len(weights))
    built = tiny.build()
    blocks = [child for child in built if isinstance(child, tiny.Block)]
    matrices = sum(p.nbytes for block in blocks for p in block.parameters() if p.dim() == 2)
    weights = list(built.parameters())
    x = 4 * tiny.BATCH * tiny.TIME * tiny.WIDTH
    return Sizes(sum(p.nbytes for p in weights), matrices, x, len(blocks), len(weights))


def by_plan_ddp(cluster: mk.Cluster) -> Reported:
    """Train the GPT of tiny.py on two ranks by the kit's own DDP."""
    import tiny

    ran = cluster.train(
        tiny.build(), [tiny.batch(step) for step in range(tiny.STEPS)], mk.Plan.ddp(2), loss=tiny.loss_of,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), steps=tiny.STEPS, show=False,
    ).wait()  # fmt: skip
    return ran.losses, {name: weight.double().norm().item() for name, weight in ran.state_dict().items()}


@pytest.mark.soak
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system(clusters: Clusters, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    script = name.split()[0]
    if script in NEEDS and find_spec(NEEDS[script]) is None:
        pytest.skip(f"{NEEDS[script]} is not installed (see scripts/systems.sh)")
    model = MODEL.get(name, "tiny")
    (losses, norms), size = serial("tiny" if model == "Plan.ddp" else model)
    if model == "Plan.ddp":
        monkeypatch.syspath_prepend(str(FOLDER))
        losses, norms = by_plan_ddp(clusters(2))
    cluster = clusters(RANKS.get(name, 2))
    with TemporaryDirectory() as folder:
        cluster.run(run, name, folder, watch=True, timeout=60)
        found = reported(folder)
    timeline = cluster.timeline()
    with TemporaryDirectory() as folder:
        peaks = cluster.run(profiled, name, folder, timeout=60)
        assert reported(folder) == found, "watching changes the results"
    near = 1e-3 if name == "ddp fp16" else 1e-5
    assert found[0] == pytest.approx(losses, rel=near)
    assert found[1] == pytest.approx({each: norms[each] for each in found[1]}, rel=max(1e-4, near))
    step = timeline.step(timeline.steps[-2])  # after the last one scripts gather the weights that they report
    for kind, nbytes in SYSTEMS[name](size).items():
        sent = sum(sent.get(kind, 0) for sent in step.comm_bytes) / step.world_size
        assert sent == pytest.approx(nbytes, rel=0.005), kind
    if name != "mirrored":  # whose memory is not torch's
        for peak, held in zip(peaks, timeline.peak_memory_of_run, strict=True):
            assert abs(peak.off(held["total"])) <= 0.03
