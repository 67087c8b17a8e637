"""Traces of a small program, written as torch.profiler writes them, for tests that change them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HOST, ENGINE = 100, 200


class Program:
    """The events of one rank: what the program calls, and what its GPU runs. Times are us.

    Args:
        rank, world: its number, and the number of ranks.
        gpu: the name of its GPU.
        header: what the file says besides.
    """

    def __init__(
        self, rank: int = 0, world: int = 1, gpu: str = "NVIDIA H100 80GB HBM3", **header: Any
    ) -> None:
        group = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": world, "ranks": [*range(world)]}
        self.events: list[dict[str, Any]] = []
        self.header = {
            "schemaVersion": 1,
            "host_name": "host",
            "deviceProperties": [{"id": 0, "name": gpu}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world, "pg_config": [group]},
            **header,
        }
        self.ranks = [*range(world)]
        self._calls = 0

    def span(
        self, category: str, name: str, start: float, length: float, thread: Any = HOST, **args: Any
    ) -> None:
        """Add a span of the host."""
        place = {"pid": HOST, "tid": thread, "ts": start, "dur": length}
        self.events.append({"ph": "X", "cat": category, "name": name, **place, "args": args})

    def annotation(self, name: str, start: float, length: float, **args: Any) -> None:
        """Add an annotation of the program's thread."""
        self.span("user_annotation", name, start, length, **args)

    def kernel(
        self, name: str, asked: float, start: float, length: float, *, op: str = "aten::mm", thread: int = HOST,
        stream: int = 7, category: str = "kernel", shapes: Any = (), types: Any = (), **args: Any,
    ) -> None:  # fmt: skip
        """Add a kernel, the operator that asks for it and the call that launches it."""
        self._calls += 1
        ids = {"External id": self._calls, "correlation": self._calls}
        inputs = {"Input Dims": list(shapes), "Input type": list(types)} if shapes else {}
        self.span("cpu_op", op, asked, 4, thread, **{"External id": self._calls}, **inputs)
        self.span("cuda_runtime", "cudaLaunchKernel", asked + 1, 2, thread, **ids)
        place = {"pid": 0, "tid": stream, "ts": start, "dur": length}
        here = {"device": 0, "stream": stream}
        self.events.append(
            {"ph": "X", "cat": category, "name": name, **place, "args": {**ids, **here, **args}}
        )

    def collective(
        self, kind: str, asked: float, start: float, end: float, elements: int, *, thread: int = ENGINE,
        ranks: Sequence[int] | None = None, name: str = "", splits: Any = (),
    ) -> None:  # fmt: skip
        """Add a collective of float32; `splits` are the rows for each rank."""
        members = [*(self.ranks if ranks is None else ranks)]
        said = {
            "Collective name": kind, "In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float",
            "Group size": len(members), "Process Group Name": ",".join(map(str, members)),
            "Process Group Ranks": json.dumps(members),
            "In split size": json.dumps(splits) if isinstance(splits, list) else "[]",
        }  # fmt: skip
        kernel = name or f"ncclDevKernel_{kind}_f32_RING_LL"
        self.kernel(
            kernel, asked, start, end - start, op="record_param_comms", thread=thread, stream=20, **said
        )

    def json(self) -> dict[str, Any]:
        """Return what the file holds."""
        return {**self.header, "traceEvents": self.events}


def ddp_program(rank: int = 0, world: int = 2, steps: int = 2, late: float = 0.0) -> Program:
    """Return a rank of a DDP program: each step loads, computes, reduces and updates.

    Args:
        rank, world: its number, and the number of ranks.
        steps: how many it was profiled for.
        late: us by which its host launches all but the reduction later.
    """
    program = Program(rank, world, baseTimeNanoseconds=1_700_000_000_000_000_000)
    program.events.append(
        {"ph": "M", "name": "process_name", "pid": HOST, "tid": 0, "ts": 0, "args": {"name": "py"}}
    )
    for number in range(steps):
        at = 1000.0 + 2000 * number
        program.annotation(f"ProfilerStep#{number + 3}", at, 1990)
        program.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at + 1, 20)
        program.kernel(
            "Memcpy HtoD (Pinned -> Device)", at + 22, at + 30, 10, op="aten::copy_", category="gpu_memcpy", bytes=4096
        )  # fmt: skip
        program.annotation("DistributedDataParallel.forward", at + 35 + late, 100)
        sizes = {"shapes": [[64, 64], [64, 64]], "types": ["float"] * 2}
        program.kernel("gemm_forward", at + 40 + late, at + 60 + late, 300, **sizes)
        held = {
            "Addr": 1, "Bytes": 1024, "Device Type": 1, "Device Id": 0, "Total Allocated": 2048, "Total Reserved": 4096,
        }  # fmt: skip
        program.events.append({
            "ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", "pid": HOST, "tid": HOST,
            "ts": at + 45, "args": held,
        })  # fmt: skip
        program.span(
            "cpu_op", "autograd::engine::evaluate_function: MmBackward0", at + 150 + late, 60, ENGINE
        )
        program.kernel("gemm_backward", at + 160 + late, at + 400 + late, 300, thread=ENGINE)
        program.collective("allreduce", at + 180 + late, at + 700 + late, at + 1100, 1000)
        program.annotation("Optimizer.step#AdamW.step", at + 1150, 200)
        program.kernel("adam", at + 1160, at + 1200, 300, op="aten::_foreach_add_")
    return program


def write_ranks(folder: Path, programs: Sequence[Program]) -> Path:
    """Write a file per rank, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, program in enumerate(programs):
        rank = program.header["distributedInfo"].get("rank", number)
        (folder / f"rank{rank}.json").write_text(json.dumps(program.json()))
    return folder
