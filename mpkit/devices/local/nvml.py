"""What NVML, the driver's library for monitoring, says of a GPU: utilisation, memory in use, traffic on its links.

The package nvidia-ml-py (module pynvml) is imported when a run on GPUs begins, and nowhere else. It has run on one
H200, whose answers are in benchmarks/gpu/h200.json; that machine's NVLink is not connected, so traffic over NVLink is
written from NVML's documentation and tested with samples that were made by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isnan, nan
from typing import Any, NamedTuple

__all__ = ["NOT_SAMPLED", "GpuReading", "NvmlGpu", "NvmlMissing", "open_nvml"]

KB, KIB = 1000, 1024
"""The units in which NVML counts traffic: over PCIe, and over NVLink."""

NOT_SAMPLED = "GPUs were not sampled (utilisation, memory in use, link traffic)"


class NvmlMissing(Exception):
    """NVML cannot be used here; the message says why, and which command fixes it or looks for the cause."""


class GpuReading(NamedTuple):
    """What NVML says of a GPU at one moment; nan where the GPU or its driver does not tell.

    Attributes:
        utilisation: percent of the driver's last sample period (1/6 s to 1 s) in which a kernel ran.
        memory: bytes in use, by all processes and the driver.
        nvlink_sent, nvlink_received: bytes of data over all links, counted from a moment that only the driver knows.
        pcie_sent, pcie_received: bytes per second, over the 20 ms that asking takes.
    """

    utilisation: float
    memory: float
    nvlink_sent: float
    nvlink_received: float
    pcie_sent: float
    pcie_received: float


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
        ways = nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
        every = [[(way, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)] for way in ways]
        # Only links that count: a GPU has fewer than the most, and not all of them are connected.
        self._sent, self._received = (
            [field for field in fields if not isnan(self._sum_counters([field]))] for fields in every
        )

    def read(self) -> GpuReading:
        """Ask for everything; this takes some 40 ms where the GPU counts PCIe traffic."""
        nvml, gpu = self._nvml, self._gpu
        # PCIe first, which takes long: the others are then of the moment at which this returns.
        pcie_sent = self._ask(lambda: nvml.nvmlDeviceGetPcieThroughput(gpu, nvml.NVML_PCIE_UTIL_TX_BYTES))
        pcie_received = self._ask(lambda: nvml.nvmlDeviceGetPcieThroughput(gpu, nvml.NVML_PCIE_UTIL_RX_BYTES))
        utilisation = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used)
        nvlink_sent, nvlink_received = self._sum_counters(self._sent), self._sum_counters(self._received)
        return GpuReading(
            utilisation, memory, nvlink_sent, nvlink_received, KB * pcie_sent, KB * pcie_received
        )

    def _ask(self, question: Callable[[], float]) -> float:
        try:
            return float(question())
        except self._nvml.NVMLError:  # not supported, or the GPU is lost
            return nan

    def _sum_counters(self, fields: list[tuple[int, int]]) -> float:
        """Return the bytes that the counters of some links add up to; nan if there are none, or one does not tell."""
        if not fields:
            return nan
        try:
            values = self._nvml.nvmlDeviceGetFieldValues(self._gpu, fields)
        except self._nvml.NVMLError:
            return nan
        if any(value.nvmlReturn != self._nvml.NVML_SUCCESS for value in values):
            return nan
        return float(KIB * sum(value.value.ullVal for value in values))
