"""The sampler: what the ranks' GPUs are doing, ten times per second, beside what the ranks record of themselves.

A thread of the process that watches the run asks NVML, so that no rank spends time on it, and writes rank3.gpu in the
launch's folder for every rank on that GPU, on the clock of the ranks' operations.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpkit.common.launch_folder import Settings, part
from mpkit.devices.local.gpus import inventory_of
from mpkit.devices.local.nvml import NOT_SAMPLED, NvmlGpu, NvmlMissing, open_nvml
from mpkit.trace import HEADER, SAMPLE
from mpkit.trace.record.files import RecordFile

__all__ = ["PERIOD", "GpuSampler", "gpus_of", "sampler_for"]

PERIOD = 0.1
"""Seconds from one sample of a GPU to the next."""

GIVE_UP = 1.0
"""Seconds to wait for the thread where a GPU no longer answers."""


def sampler_for(settings: Settings) -> GpuSampler:
    """Return the sampler of a launch; one that samples nothing where ranks are on no GPU that NVML can read."""
    if settings.device != "cuda":
        return GpuSampler(None, [])
    try:
        gpus, nvml = gpus_of(settings), open_nvml()
        try:
            return GpuSampler(nvml, gpus)
        except NvmlMissing:
            nvml.nvmlShutdown()
            raise
    except NvmlMissing as missing:
        return GpuSampler(None, [], str(missing))


def gpus_of(settings: Settings) -> list[str]:
    """Return the UUID of each rank's GPU.

    Raises:
        NvmlMissing: it is not known.
    """
    inventory = inventory_of("cuda")
    numbers = settings.numbers or list(range(settings.devices))
    found = [
        inventory.devices[numbers[rank % len(numbers)]].identity if inventory is not None else ""
        for rank in range(settings.ranks)
    ]
    if not all(found):
        raise NvmlMissing(
            f"{NOT_SAMPLED}: nvidia-smi does not tell which GPUs these ranks are on; `mpkit doctor gpus not found` "
            "looks for the cause."
        )
    return found


class GpuSampler:
    """Samples the GPUs of a launch's ranks from `start` to `close`.

    Args:
        nvml: the module pynvml; None: nothing is sampled.
        gpus: the UUID of each rank's GPU.
        why_not: why nothing is sampled where one would expect it.

    Attributes:
        meta: what the trace's meta says of it: "sampled_gpus", a UUID per rank, or "gpus_not_sampled", a sentence.

    Raises:
        NvmlMissing: NVML does not know one of the GPUs.
    """

    def __init__(self, nvml: Any, gpus: Sequence[str], why_not: str = "") -> None:
        self._nvml = nvml
        self._ranks: dict[str, list[int]] = {}
        for rank, gpu in enumerate(gpus):
            self._ranks.setdefault(gpu, []).append(rank)
        self._gpus = {gpu: NvmlGpu(nvml, gpu) for gpu in self._ranks}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.meta: dict[str, Any] = {"sampled_gpus": list(gpus)} if gpus else {}
        if why_not:
            self.meta["gpus_not_sampled"] = why_not

    def start(self, folder: Path) -> None:
        """Sample from now on, into the folder of the launch.

        Raises:
            OSError: the disk has no space for the samples.
        """
        if not self._ranks:
            return
        files = {
            gpu: [RecordFile(part(folder, rank, "gpu"), "gpu", SAMPLE.itemsize, 512) for rank in ranks]
            for gpu, ranks in self._ranks.items()
        }
        self._thread = threading.Thread(target=self._sample, args=(files,), name="mpkit-gpus", daemon=True)
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

    def _sample(self, files: dict[str, list[RecordFile]]) -> None:
        """Write a sample of each GPU every `PERIOD` until it is over."""
        due = time.monotonic()
        while True:
            for gpu, own in self._gpus.items():
                reading = own.read()
                sample = np.array([(time.monotonic_ns(), *reading)], SAMPLE).tobytes()
                for file in [file for file in files[gpu] if not _write(file, sample)]:
                    file.close(1)  # the disk is full: a warning has said so
                    files[gpu].remove(file)
            due = max(due + PERIOD, time.monotonic())
            if self._over.wait(due - time.monotonic()):
                break
        for file in (each for own in files.values() for each in own):
            file.close(1)


def _write(file: RecordFile, sample: bytes) -> bool:
    """Append a record; return False if there is no room for it."""
    if file.count >= file.capacity and not file.grow():
        return False
    place = HEADER.itemsize + file.size * file.count
    file.map[place : place + file.size] = sample
    file.publish(file.count + 1)
    return True
