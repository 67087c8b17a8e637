"""FakeNvml: plays samples in place of the module pynvml.

`samples-made-by-hand.json` has the format that a recording of NVML's answers would have: raw values in NVML's units, by
GPU, one entry per round of questions. They are made up, since no two GPUs were at hand.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SAMPLES = Path(__file__).with_name("samples-made-by-hand.json")


class FakeNvml:
    """The part of pynvml that mpkit uses, with its names and its errors.

    Args:
        recording: by UUID, the rounds: {"utilisation": %, "memory": bytes}; what a round lacks is not supported. The
            last round is repeated.
        trouble: what `nvmlInit` raises, if it raises.
    """

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

    def next_round(self, gpu: str) -> None:
        """Let the next round of questions have the next answers."""
        self.at[gpu] += 1
