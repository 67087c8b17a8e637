"""FakeNvml: plays samples in place of the module pynvml.

`samples-made-by-hand.json` has the format that a recording of NVML's answers would have: raw values in NVML's units, by
GPU, one entry per round of questions. They are made up, since they have what no GPU at hand had: two GPUs and NVLink.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SAMPLES = Path(__file__).with_name("samples-made-by-hand.json")


class FakeNvml:
    """The part of pynvml that mpkit uses, with its names and its errors.

    Args:
        recording: by UUID, the rounds: {"utilisation": %, "memory": bytes, "pcie": [KB/s, KB/s], "nvlink": {link:
            [KiB, KiB]}}; what a round lacks is not supported. The last round is repeated.
        trouble: what `nvmlInit` raises, if it raises.
    """

    NVML_SUCCESS = 0
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139
    NVML_NVLINK_MAX_LINKS = 36

    class NVMLError(Exception):
        """An answer that is none."""

    def __init__(self, recording: dict[str, list[dict[str, Any]]] | None = None, trouble: str = "") -> None:
        self.recording = recording if recording is not None else json.loads(SAMPLES.read_text())["gpus"]
        self.trouble = trouble
        self.at = dict.fromkeys(self.recording, 0)
        self.open = 0

    def nvmlInit(self) -> None:
        if self.trouble:
            raise self.NVMLError(self.trouble)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.recording:
            raise self.NVMLError("Not Found")
        return uuid

    nvmlDeviceGetHandleByPciBusId = nvmlDeviceGetHandleByUUID

    def _told(self, gpu: str, what: str) -> Any:
        rounds = self.recording[gpu]
        value = rounds[min(self.at[gpu], len(rounds) - 1)].get(what)
        if value is None:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlDeviceGetUtilizationRates(self, gpu: str) -> Any:
        return SimpleNamespace(gpu=self._told(gpu, "utilisation"))

    def nvmlDeviceGetMemoryInfo(self, gpu: str) -> Any:
        used = self._told(gpu, "memory")
        return SimpleNamespace(total=80 << 30, used=used, free=(80 << 30) - used)

    def nvmlDeviceGetPcieThroughput(self, gpu: str, way: int) -> int:
        return int(self._told(gpu, "pcie")[way])

    def nvmlDeviceGetFieldValues(self, gpu: str, fields: list[tuple[int, int]]) -> list[Any]:
        """Answer each field with its own return code, as NVML does; a round ends with the question of all links."""
        links = self.recording[gpu][min(self.at[gpu], len(self.recording[gpu]) - 1)].get("nvlink", {})
        found = []
        for field, link in fields:
            there = str(link) in links
            way = field - self.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
            counted = links[str(link)][way] if there else 0
            found.append(SimpleNamespace(nvmlReturn=0 if there else 3, value=SimpleNamespace(ullVal=counted)))
        return found

    def next_round(self, gpu: str) -> None:
        """Let the next round of questions have the next answers."""
        self.at[gpu] += 1
