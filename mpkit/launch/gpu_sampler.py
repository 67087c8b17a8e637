"""The sampler: what the ranks' GPUs are doing, ten times per second, beside what the ranks record of themselves.

A thread of the process that watches the run asks NVML, the driver's library for monitoring, so that no rank spends time
on it, and writes rank3.gpu in the launch's folder for every rank on that GPU, on the clock of the ranks' operations.
The package nvidia-ml-py (module pynvml) is imported when a run on GPUs begins. It has run on one H200, whose answers
are in benchmarks/gpu/h200.json.
"""

import threading
import time
from contextlib import suppress
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from mpkit.common.launch_folder import Settings, part
from mpkit.devices.local.gpus import inventory_of
from mpkit.trace import SAMPLE
from mpkit.trace.record.files import RecordFile

PERIOD = 0.1  # seconds from one sample of a GPU to the next
GIVE_UP = 1.0  # seconds to wait for the thread where a GPU no longer answers
NOT_SAMPLED = "GPUs were not sampled (utilisation, memory in use)"


def gpus_of(settings: Settings) -> list[str]:
    """Return the UUID or bus id of each rank's GPU; "" where it is not known."""
    numbers = [settings.numbers[rank % len(settings.numbers)] for rank in range(settings.ranks)]
    inventory = inventory_of("cuda")
    return ["" if inventory is None else inventory.devices[number].identity for number in numbers]


def read_gpu(nvml: Any, gpu: Any) -> tuple[float, float]:
    """Return a GPU's utilisation and its memory in use; nan where the GPU or its driver does not tell.

    Utilisation is the percent of the driver's last sample period (1/6 s to 1 s) in which a kernel ran; memory is in
    bytes, of all processes and the driver.
    """
    utilisation = used = nan
    with suppress(nvml.NVMLError):  # not supported, or the GPU is lost
        utilisation = float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
    with suppress(nvml.NVMLError):
        used = float(nvml.nvmlDeviceGetMemoryInfo(gpu).used)
    return utilisation, used


class GpuSampler:
    """Samples the GPUs of a launch's ranks from `start` to `close`; none where they are not on GPUs that NVML knows.

    `meta` is the trace's: "sampled_gpus", a UUID per rank, or "gpus_not_sampled", a sentence.
    """

    def __init__(self, settings: Settings) -> None:
        self._nvml: Any = None
        self._gpus: dict[str, tuple[Any, list[int]]] = {}  # by UUID: NVML's handle, and the ranks on it
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.meta: dict[str, Any] = {}
        if settings.device == "cuda":
            gpus = gpus_of(settings)
            why = self._open(gpus)
            self.meta = {"gpus_not_sampled": f"{NOT_SAMPLED}: {why}."} if why else {"sampled_gpus": gpus}

    def _open(self, gpus: list[str]) -> str:
        """Find the ranks' GPUs with NVML; return why that is not possible, "" if it is."""
        steps = "`mpkit doctor gpus not found` looks for the cause"
        if not all(gpus):
            return f"nvidia-smi does not tell which GPUs these ranks are on; {steps}"
        try:
            import pynvml
        except ImportError:
            return 'the package nvidia-ml-py is missing; pip install "mpkit[gpu]" installs it'
        gpu = ""
        try:
            pynvml.nvmlInit()
            for gpu in dict.fromkeys(gpus):
                by = "UUID" if gpu.startswith("GPU-") else "PciBusId"
                handle = getattr(pynvml, f"nvmlDeviceGetHandleBy{by}")(gpu)
                self._gpus[gpu] = handle, [rank for rank, each in enumerate(gpus) if each == gpu]
        except pynvml.NVMLError as error:
            if not gpu:
                return f"NVML answers {str(error)!r}; {steps}"
            self._gpus.clear()
            pynvml.nvmlShutdown()
            return f"NVML answers {str(error)!r} for {gpu}; `nvidia-smi -L` lists the GPUs"
        self._nvml = pynvml
        return ""

    def start(self, folder: Path) -> None:
        """Sample from now on, into the folder of the launch."""
        files = [
            (gpu, [RecordFile(part(folder, rank, "gpu"), "gpu", SAMPLE.itemsize, 512) for rank in ranks])
            for gpu, ranks in self._gpus.values()
        ]
        if files:
            how: dict[str, Any] = {"name": "mpkit-gpus", "daemon": True}
            self._thread = threading.Thread(target=self._sample, args=(files,), **how)
            self._thread.start()

    def close(self) -> None:
        """Take no more samples; those that were taken are complete when this returns."""
        if self._over.is_set():
            return
        self._over.set()
        if self._thread is not None:
            self._thread.join(GIVE_UP)
        if self._nvml is not None and (self._thread is None or not self._thread.is_alive()):
            self._nvml.nvmlShutdown()

    def _sample(self, files: list[tuple[Any, list[RecordFile]]]) -> None:
        """Write a sample of each GPU every `PERIOD` until it is over."""
        due = time.monotonic()
        while True:
            for gpu, own in files:
                sample = np.array([(time.monotonic_ns(), *read_gpu(self._nvml, gpu))], SAMPLE).tobytes()
                for file in [file for file in own if not file.append(sample)]:
                    file.close(1)  # the disk is full: a warning has said so
                    own.remove(file)
            due = max(due + PERIOD, time.monotonic())
            if self._over.wait(due - time.monotonic()):
                break
        for file in (each for _, own in files for each in own):
            file.close(1)
