"""Every reader of files that may be a stranger's: what it reads when all is well, and the one error that it raises."""

import contextlib
import gzip
import hashlib
import io
import json
import random
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mpkit as mk
from mpkit import Plan
from mpkit.course.grading.submissions import NoNotebook, checks_in, code_cells
from mpkit.course.progress import Progress
from mpkit.errors import TraceError
from mpkit.prediction.cost_model.known_models import architecture_of
from mpkit.strategies.checkpoint.files import digest
from mpkit.strategies.checkpoint.head import HEAD, CheckpointHead, seal
from mpkit.strategies.checkpoint.parts import write_rank
from mpkit.strategies.prepare.resume import find_checkpoint
from mpkit.strategies.stage.shard import HeldPart
from mpkit.timeline.foreign.open_trace import OpenedTrace
from mpkit.timeline.timeline import Timeline
from mpkit.trace import HEADER, Kind, Trace
from mpkit.trace.record.recorder import Recorder
from tests.fuzz.mutate import Damage, damaged_bytes, damaged_json, damaged_text


@dataclass(frozen=True)
class Reader:
    """A reader.

    Attributes:
        ending: of its files.
        seeds: makes contents of files that it reads; of a folder, a zip of it.
        damage: how a content is damaged.
        read: reads a file, and does what is usually done with what was in it.
        error: what it raises.
        names: whether its errors name the file.
    """

    ending: str
    seeds: Callable[[], list[bytes]]
    damage: Damage
    read: Callable[[Path], Any]
    error: type[Exception]
    names: bool = True


def plans(*formats: str) -> Callable[[], list[bytes]]:
    of = Plan(pp=2, dp=2, tp=2, schedule="1f1b", microbatches=4)
    return lambda: [(Plan.zero(3, 4) if name == "fsdp" else of).to(name).encode() for name in formats]


SCRIPT = b"""#!/bin/bash
#SBATCH --nodes=2
TP=2; PP=${PP:-4}; N=$((TP * PP))
if [ $N -gt 4 ]; then ARGS+=(--log-memory); fi
ARGS=( --tensor-model-parallel-size $TP  --pipeline-model-parallel-size "${PP}" )
cat <<EOF > x
text
EOF
for i in 1 2; do echo `date` $(nproc); done
torchrun --nproc_per_node 8 --nnodes=$N pretrain.py "${ARGS[@]}" --micro-batch-size 1 --global-batch-size 64 'x y'
"""


def chrome(events: list[dict[str, Any]], **header: Any) -> bytes:
    return json.dumps({"traceEvents": events, **header}).encode()


def kineto() -> list[bytes]:
    """A step of a rank with a GPU, a step of one without; and the first, zipped."""
    group = {
        "Collective name": "allreduce", "In msg nelems": 8, "Out msg nelems": 8, "dtype": "Float", "Group size": 2,
        "Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Seq": 1,
    }  # fmt: skip

    def span(cat: str, name: str, ts: float, dur: float, tid: Any = 1, **args: Any) -> dict[str, Any]:
        return {
            "ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": 1e15 + ts, "dur": dur,
            "args": args,
        }  # fmt: skip

    host = [
        span("user_annotation", "ProfilerStep#3", 0, 100), span("user_annotation", "PP:0F0", 1, 20),
        span("cpu_op", "aten::mm", 2, 9, **{"External id": 5, "Sequence number": 2, "Input Dims": [[2, 2]]}),
        span("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 30, 20),
        span("cpu_op", "torch::autograd::AccumulateGrad", 40, 5, **{"Input Dims": [[2, 2]]}),
        span("cpu_op", "record_param_comms", 52, 5, **group),
        span("user_annotation", "gloo:all_reduce", 52, 5, 2, **{"Input Dims": [[8]], "Input type": ["float"]}),
        span("user_annotation", "Optimizer.step#AdamW.step", 60, 20),
        span("python_function", "nn.Module: Linear_0", 2, 8),
        {"ph": "i", "name": "[memory]", "ts": 1e15 + 5, "args": {"Bytes": 16, "Device Type": 0, "Total Allocated": 16}},
    ]  # fmt: skip
    device = [
        span("cuda_runtime", "cudaLaunchKernel", 3, 2, **{"correlation": 9, "External id": 5}),
        span("kernel", "gemm", 6, 10, 7, device=0, stream=7, correlation=9),
        span("cuda_runtime", "cudaLaunchKernel", 53, 2, correlation=10),
        span(
            "kernel", "ncclDevKernel_AllReduce_Sum_f32", 55, 9, 8, device=0, stream=8, correlation=10, **group
        ),
        span("gpu_memcpy", "Memcpy HtoD", 70, 3, 7, device=0, stream=7, bytes=64),
    ]
    about = {
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2, "pg_config": [
            {"pg_name": "0", "pg_desc": "mesh_dp", "pg_size": 2, "ranks": [0, 1]}]},
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}], "baseTimeNanoseconds": 7,
    }  # fmt: skip
    texts = [chrome(host + device, **about), chrome(host)]
    return [*texts, gzip.compress(texts[0])]


def damaged_trace(data: bytes, draw: random.Random) -> bytes:
    if data[:2] != b"\x1f\x8b":
        return damaged_json(data, draw)
    inside = gzip.compress(damaged_json(gzip.decompress(data), draw))
    return damaged_bytes(data, draw) if draw.random() < 0.5 else inside


def look(trace: Trace) -> None:
    """Show a trace, as a reader would."""
    assert len(trace.losses) < 100_000
    timeline = trace.timeline() if isinstance(trace, OpenedTrace) else Timeline.of(trace)
    assert str(timeline)
    timeline.to_svg()


def run_folder() -> list[bytes]:
    """The folder of a run that is not over, as a zip."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorders = [Recorder(folder, rank) for rank in range(2)]
        for rank, record in enumerate(recorders):
            for step in range(2):
                with record.step(step):
                    record.ledger.change(("params", 100))
                    record.end(record.begin(Kind.FORWARD, "layer", microbatch=0))
                    record.end(
                        record.begin(
                            (Kind.SEND, Kind.RECV)[rank], group="0>1#a", number=step, peer=1 - rank, nbytes=8
                        )
                    )
                    record.end(record.begin(Kind.ALL_REDUCE, group="0,1", number=step, nbytes=8))
                    record.loss(1.0)
            record.log("lr", 0.1)
        (folder / "meta.json").write_text(json.dumps({
            "world_size": 2, "device": "cpu", "plan": Plan.ddp(2).to_json(), "hardware": "cpu", "first_step": 0,
            "replicas": [[0], [1]], "flops": {"0": 1.0}, "axes": {"0,1": "dp"},
        }))  # fmt: skip
        files = {
            path.name: path.read_bytes()[: HEADER.itemsize + 88 * 12]
            if path.suffix in (".ops", ".mem", ".log")
            else path.read_bytes()
            for path in sorted(folder.iterdir())
        }
    return [zipped(files)]


def zipped(files: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return data.getvalue()


def damaged_zip(data: bytes, draw: random.Random) -> bytes:
    """Damage a file within a zip, or now and then the zip itself."""
    if draw.random() < 0.1:
        return damaged_bytes(data, draw)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    name = draw.choice(list(files))
    files[name] = (damaged_json if name.endswith(".json") else damaged_bytes)(files[name], draw)
    return zipped(files)


def in_folder(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Unzip a file into a folder, and read that."""

    def unzipped(path: Path) -> Any:
        folder = path.with_suffix(".folder")
        folder.mkdir(exist_ok=True)
        try:
            with zipfile.ZipFile(path) as archive:
                archive.extractall(folder)
        except (
            zipfile.BadZipFile,
            zlib.error,
            OSError,
            ValueError,
            NotImplementedError,
            EOFError,
            RuntimeError,
            IndexError,  # Python's own, of an empty name
        ):
            return None  # it is not the zip that is read
        return read(folder)

    return unzipped


def saved_traces() -> list[bytes]:
    with tempfile.TemporaryDirectory() as name:
        folder, path = Path(name, "run"), Path(name, "run.trace")
        folder.mkdir()
        with zipfile.ZipFile(io.BytesIO(run_folder()[0])) as archive:
            archive.extractall(folder)
        Trace.load(folder).save(path)
        return [path.read_bytes()]


def checkpoint() -> list[bytes]:
    """A checkpoint of one rank, as a zip of its folder."""
    form, facts = "[4, 3] float32", {"others": {}, "optimizer": "AdamW", "states": ["step"]}
    with tempfile.TemporaryDirectory() as name:
        state = {
            "weight/0.weight": HeldPart(torch.arange(12.0), (4, 3)),
            "random/0": HeldPart(torch.zeros(16, dtype=torch.uint8), (16,)),
        }
        write_rank(Path(name, "rank-0.pt"), state)
        head = CheckpointHead(
            step=2, plan=json.loads(Plan.serial().to_json()), world_size=1,
            facts={"trained": {"0.weight": form}, **facts}, scaler={"scale": 1.0, "good": 0}, skipped=0,
            training="0" * 32,
        )  # fmt: skip
        head.files = {path.name: digest(path) for path in Path(name).iterdir()}
        head.write(Path(name))
        return [zipped({path.name: path.read_bytes() for path in sorted(Path(name).iterdir())})]


def damaged_checkpoint(data: bytes, draw: random.Random) -> bytes:
    """Damage a file of a checkpoint; half of the time, seal it again, as whoever means harm would."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    name = draw.choice([HEAD, HEAD, *files])
    files[name] = (damaged_json if name == HEAD else damaged_bytes)(files[name], draw)
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError, RecursionError):
        head = json.loads(files[HEAD])
        if draw.random() < 0.5 and isinstance(head.pop("sha256", None), str):
            for one in head["files"]:
                if one in files:
                    head["files"][one] = [len(files[one]), hashlib.sha256(files[one]).hexdigest()]
            files[HEAD] = seal(head).encode()
    return zipped(files)


def notebooks() -> list[bytes]:
    output = {
        "output_type": "display_data", "data": {"application/x": {}, "text/plain": ["x"]}, "metadata": {},
    }  # fmt: skip
    cells = [
        {
            "cell_type": "code",
            "source": ["import mpkit as mk\n", "mk.check('gpipe', gpipe)"],
            "outputs": [output],
        },
        {"cell_type": "markdown", "source": "because", "metadata": {}},
    ]
    return [json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}).encode()]


def grade(path: Path) -> None:
    data = path.read_bytes()
    for source in code_cells(data):
        list(checks_in(source))


def progress(path: Path) -> None:
    path = path.rename(path.with_name("mpkit-progress.json"))
    Progress.read(path.parent)


CONFIG = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99,
          "intermediate_size": 128, "num_key_value_heads": 2}  # fmt: skip

READERS: dict[str, Reader] = {
    "JSON of a plan": Reader(
        ".json", plans("deepspeed", "tf_config"), damaged_json, Plan.read, ValueError
    ),
    "YAML of a plan": Reader(
        ".yaml", plans("accelerate", "trainer"), damaged_text, Plan.read, ValueError
    ),
    "Python of a plan": Reader(".py", plans("torchtitan", "fsdp"), damaged_text, Plan.read, ValueError),
    "script of a plan": Reader(
        ".sh", lambda: [SCRIPT, *plans("megatron", "slurm", "torchrun")()], damaged_text, Plan.read, ValueError
    ),
    "text of a plan": Reader(
        "", lambda: [SCRIPT, *plans("deepspeed", "accelerate", "torchtitan", "megatron")()], damaged_text, Plan.read,
        ValueError,
    ),
    "trace of a profiler": Reader(".json", kineto, damaged_trace, lambda path: look(mk.open(path)), TraceError, False),
    "saved trace": Reader(".trace", saved_traces, damaged_zip, lambda path: look(mk.open(path)), TraceError, False),
    "folder of a run": Reader(
        ".zip", run_folder, damaged_zip, in_folder(lambda path: look(Trace.load(path))), TraceError, False
    ),
    "notebook": Reader(".ipynb", notebooks, damaged_json, grade, NoNotebook, False),
    "file of progress": Reader(
        ".json", lambda: [b'{"exercises": {"gpipe": {"tries": 1, "passed": false}}, "predictions": {}}'],
        damaged_json, progress, ValueError, False,
    ),
    "config of a model": Reader(
        ".json", lambda: [json.dumps(CONFIG).encode()], damaged_json, architecture_of, ValueError
    ),
    "checkpoint": Reader(".zip", checkpoint, damaged_checkpoint, in_folder(find_checkpoint), ValueError, False),
}  # fmt: skip
