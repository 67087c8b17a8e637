"""What NVML, the driver's library for monitoring, says of a GPU: utilisation and memory in use.

The package nvidia-ml-py (module pynvml) is imported when a run on GPUs begins, and nowhere else. It has run on one
H200, whose answers are in benchmarks/gpu/h200.json.
"""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import Any, NamedTuple

__all__ = ["NOT_SAMPLED", "GpuReading", "NvmlGpu", "NvmlMissing", "open_nvml"]

NOT_SAMPLED = "GPUs were not sampled (utilisation, memory in use)"


class NvmlMissing(Exception):
    """NVML cannot be used here; the message says why, and which command fixes it or looks for the cause."""


class GpuReading(NamedTuple):
    """What NVML says of a GPU at one moment; nan where the GPU or its driver does not tell.

    Attributes:
        utilisation: percent of the driver's last sample period (1/6 s to 1 s) in which a kernel ran.
        memory: bytes in use, by all processes and the driver.
    """

    utilisation: float
    memory: float


def open_nvml() -> Any:
    """Return the module pynvml, ready to use; its `nvmlShutdown` ends the use.

    Raises:
        NvmlMissing: the package or the driver's library is missing.
    """
    try:
        import pynvml
    except ImportError:
        raise NvmlMissing(
            f'{NOT_SAMPLED}: the package nvidia-ml-py is missing; pip install "mpkit[gpu]" installs it.'
        ) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlMissing(
            f"{NOT_SAMPLED}: NVML answers {str(error)!r}; `mpkit doctor gpus not found` looks for the cause."
        ) from None
    return pynvml


class NvmlGpu:
    """One GPU, as NVML sees it.

    Args:
        nvml: the module, as `open_nvml` returns it.
        identity: the GPU's UUID, or its bus id.

    Raises:
        NvmlMissing: NVML knows no such GPU.
    """

    def __init__(self, nvml: Any, identity: str) -> None:
        self._nvml = nvml
        find = (
            nvml.nvmlDeviceGetHandleByUUID
            if identity.startswith("GPU-")
            else nvml.nvmlDeviceGetHandleByPciBusId
        )
        try:
            self._gpu = find(identity)
        except nvml.NVMLError as error:
            raise NvmlMissing(
                f"{NOT_SAMPLED}: NVML answers {str(error)!r} for {identity}; `nvidia-smi -L` lists the GPUs."
            ) from None

    def read(self) -> GpuReading:
        """Ask for everything."""
        nvml, gpu = self._nvml, self._gpu
        utilisation = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
        return GpuReading(utilisation, self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used))

    def _ask(self, question: Callable[[], float]) -> float:
        try:
            return float(question())
        except self._nvml.NVMLError:  # not supported, or the GPU is lost
            return nan
