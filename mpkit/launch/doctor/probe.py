"""The facts of a machine, as plain data that JSON can hold.

NVML, the driver's library, describes GPUs, their links and PCI Express lanes. A process of its own asks it, within ten
seconds, because the driver hangs where a GPU has fallen off the bus.
"""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias

from mpkit.common.process_wide import cores

Ask: TypeAlias = Callable[..., Any]  # calls a function of NVML; None where this GPU or driver does not tell
Facts: TypeAlias = dict[str, Any]
"""The facts:

    nvml         {"driver", "cuda": [12, 8], "gpus": [...], "links": [...]}; or {"why": text, "failed": bool}
      a GPU      name, uuid, bus_id, memory and used (bytes), busy (percent), compute ([9, 0]); lanes, card_lanes,
                 generation (of card and slot together), card_generation; nvlinks (bytes per second in one direction of
                 each link that is up), down (links that are inactive). None is what NVML does not say.
      a link     pair, near ("NV4", or "PIX", "PXB", "PHB", "NODE", "SYS" from near to far), p2p ("OK", or why not)
    memory       [bytes in all, available], within a container what it allows; None is unknown
    cpus         CPUs that this process may run on
    share        how many CPUs' time a container may use; None is all
    load         processes that ran or wanted to run in the last minute; None is unknown
    shm          [bytes in all, free] of /dev/shm; None where there is none
    limits       {"nofile": [soft, hard], "memlock": ...}; -1 is unlimited
    interfaces   the network interfaces
    infiniband   whether there is an InfiniBand card
    torch        {"version", "cuda", "hip", "gpus", "nccl", "error"}
    environment  the environment variables
    measured     {"ranks", "backend", "latency" (seconds of a message of 4 bytes), "nbytes" (of a large one),
                 "bandwidth" and "all_reduce" (bytes per second of these, the latter on the wire)}; or {"why": text}
"""

NEAR = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # by nvmlGpuTopologyLevel_t
P2P = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS", 6: "U"}  # by nvmlGpuP2PStatus_t
LIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK}
NVLINK_RATES = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
"""Bytes per second in one direction of a link, by the version of NVLink (NVIDIA's data sheets of V100 to B200)."""


def probe(limit: float = 10.0) -> Facts:
    """Ask this machine; it takes `limit` seconds at most."""
    return {
        "nvml": ask_nvml(limit), "memory": _memory(), "cpus": cores(), "share": _cpu_share(),
        "load": _ask_system(lambda: os.getloadavg()[0]),
        "shm": _ask_system(lambda: list(shutil.disk_usage("/dev/shm")[::2])),
        "limits": {name: list(resource.getrlimit(kind)) for name, kind in LIMITS.items()},
        "interfaces": [name for _, name in socket.if_nameindex()],
        "infiniband": Path("/sys/class/infiniband").is_dir(),
        "torch": torch_build(), "environment": dict(os.environ), "measured": {"why": "left out (quick)"},
    }  # fmt: skip


def ask_nvml(limit: float = 10.0, command: tuple[str, ...] = ()) -> Facts:
    """Return what NVML says, asked in a process of its own that gets `limit` seconds; tests give another `command`."""
    asks = command or (sys.executable, "-P", __file__)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(asks, **pipes, text=True, start_new_session=True)
    try:
        said, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        with suppress(subprocess.TimeoutExpired):  # one that hangs in the driver cannot be ended
            process.wait(1.0)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
        return {"why": f"NVML did not answer within {limit:g} s", "failed": True}
    if process.returncode:
        last = (errors.strip().splitlines() or ["it printed nothing"])[-1]
        return {"why": f"asking NVML failed: {last}", "failed": True}
    return dict(json.loads(said))


def torch_build() -> Facts:
    """Return what torch was built for and which devices it sees; this starts no CUDA context."""
    import torch
    import torch.distributed as dist

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gpus = torch.cuda.device_count()
    return {
        "version": torch.__version__, "cuda": torch.version.cuda or "", "hip": torch.version.hip or "", "gpus": gpus,
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "error": "; ".join(str(each.message).splitlines()[0] for each in said),
    }  # fmt: skip


def _ask_system(question: Callable[[], Any]) -> Any:
    """Return the answer; None where this system does not have it."""
    try:
        return question()
    except OSError:
        return None


def _read(path: str) -> str:
    return _ask_system(Path(path).read_text) or ""


def _memory() -> list[int] | None:
    rows = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    if "MemTotal" not in rows:
        return None
    known = [rows["MemTotal"], rows.get("MemAvailable", rows["MemTotal"])]
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    nbytes = [int(each.split()[0]) << 10 for each in known]
    return [min(each, int(limit)) if limit.isdecimal() else each for each in nbytes]


def _cpu_share() -> float | None:
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def facts_by_nvml() -> Facts:
    """Return what NVML says of this machine's GPUs; a process of its own calls this."""
    try:
        import pynvml as nvml
    except ImportError:
        return {"why": 'the package nvidia-ml-py is not installed: pip install "mpkit[gpu]"', "failed": False}

    def ask(call: Callable[..., Any], *args: Any) -> Any:
        answer = None
        with suppress(nvml.NVMLError):
            answer = call(*args)
        return answer.decode() if isinstance(answer, bytes) else answer

    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return {"why": "NVIDIA's driver is not installed", "failed": False}
    except nvml.NVMLError as error:
        return {"why": f"NVML answers {error}", "failed": True}
    handles = [ask(nvml.nvmlDeviceGetHandleByIndex, number) for number in range(nvml.nvmlDeviceGetCount())]
    if not handles:
        return {"why": "NVML: No devices were found", "failed": True}
    gpus = [_gpu(nvml, ask, handle) for handle in handles]
    links = []
    for (a, one), (b, other) in combinations(enumerate(handles), 2):
        shared = _links_between(nvml, ask, one, other, gpus[b]["bus_id"], len(gpus[a]["nvlinks"]))
        near = NEAR.get(ask(nvml.nvmlDeviceGetTopologyCommonAncestor, one, other), "SYS")
        p2p = ask(nvml.nvmlDeviceGetP2PStatus, one, other, nvml.NVML_P2P_CAPS_INDEX_READ)
        links.append({"pair": [a, b], "near": f"NV{shared}" if shared else near, "p2p": P2P.get(p2p)})
    cuda = ask(nvml.nvmlSystemGetCudaDriverVersion_v2)
    return {
        "driver": ask(nvml.nvmlSystemGetDriverVersion) or "", "gpus": gpus, "links": links,
        "cuda": [cuda // 1000, cuda % 1000 // 10] if cuda else None,
    }  # fmt: skip


def _gpu(nvml: Any, ask: Ask, handle: Any) -> Facts:
    memory, busy = ask(nvml.nvmlDeviceGetMemoryInfo, handle), ask(nvml.nvmlDeviceGetUtilizationRates, handle)
    compute = ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    rates, down = [], []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = ask(nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state == nvml.NVML_FEATURE_ENABLED:
            rates.append(NVLINK_RATES.get(ask(nvml.nvmlDeviceGetNvLinkVersion, handle, link), 25e9))
        elif state is not None:
            down.append(link)
    return {
        "name": ask(nvml.nvmlDeviceGetName, handle) or "unknown", "uuid": ask(nvml.nvmlDeviceGetUUID, handle) or "",
        "bus_id": _bus_id(ask(nvml.nvmlDeviceGetPciInfo, handle)),
        "memory": getattr(memory, "total", 0), "used": getattr(memory, "used", 0),
        "busy": getattr(busy, "gpu", None), "compute": list(compute) if compute else None,
        "lanes": ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        "card_lanes": ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        "generation": ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        "card_generation": ask(nvml.nvmlDeviceGetGpuMaxPcieLinkGeneration, handle),
        "nvlinks": rates, "down": down,
    }  # fmt: skip


def _bus_id(place: Any) -> str:
    bus = getattr(place, "busId", "")
    return bus.decode() if isinstance(bus, bytes) else str(bus)


def _links_between(nvml: Any, ask: Ask, one: Any, other: Any, bus_of_other: str, links: int) -> int:
    """Return how many NVLinks join two GPUs; through a switch, all `links` that the first has up."""
    if ask(nvml.nvmlDeviceGetP2PStatus, one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) != 0:
        return 0
    ends = [ask(nvml.nvmlDeviceGetNvLinkRemotePciInfo, one, at) for at in range(nvml.NVML_NVLINK_MAX_LINKS)]
    return sum(_bus_id(end) == bus_of_other for end in ends) or links


if __name__ == "__main__":
    print(json.dumps(facts_by_nvml()))
