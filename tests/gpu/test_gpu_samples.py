"""Samples of the ranks' GPUs: asked of NVML, written beside the trace, put on the clock of the operations, drawn.

No GPU is needed: `FakeNvml` plays samples that were made by hand in the format of a recording.
"""

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mpkit as mk
from mpkit.common.launch_folder import Settings
from mpkit.devices.local.gpus import LocalDevice, inventory_of_gpus
from mpkit.launch import gpu_sampler
from mpkit.launch.gpu_sampler import GpuSampler, gpus_of, read_gpu
from mpkit.trace import MEMORY, OP, SAMPLE, Kind, Lane, RankTrace, read_rank
from mpkit.views.timeline.text import text
from mpkit.views.timeline.tracks import device_lines, pack_tracks
from tests.gpu.fake_nvml import FakeNvml
from tests.limits import wait_for

ORIGIN = 10**15  # ns of the monotonic clock
TENTH = 10**8
FIRST, SECOND = FakeNvml().recording


def settings(ranks: int = 2, **more: object) -> Settings:
    base = Settings(ranks, "cuda", "nccl", 1, [], "", [], {}, numbers=[0, 1])
    return replace(base, **more)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """FakeNvml in place of pynvml, on a machine whose two GPUs CUDA_VISIBLE_DEVICES=1,0 has swapped."""
    cards = [LocalDevice(i, "H100", uuid, f"0{i}", 80 << 30) for i, uuid in enumerate([FIRST, SECOND])]
    monkeypatch.setattr(
        gpu_sampler, "inventory_of", lambda kind: inventory_of_gpus(cards, {"CUDA_VISIBLE_DEVICES": "1,0"}, 2)
    )
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    return fake


def played(gpu: str, ops: int = 8) -> RankTrace:
    """A rank whose forwards take 50 ms of each 100 ms, and the samples of its GPU at the end of each 100 ms."""
    fake, samples = FakeNvml(), []
    for number in range(8):
        now = ORIGIN + (number + 1) * TENTH
        samples.append(np.array([(now, *read_gpu(fake, gpu))], SAMPLE))
        fake.next_round(gpu)
    recorded = np.zeros(ops, OP)
    recorded["kind"], recorded["lane"] = Kind.FORWARD, Lane.COMPUTE
    recorded["ref"] = recorded["peer"] = recorded["number"] = -1
    recorded["microbatch"] = np.arange(ops)
    recorded["start"] = ORIGIN + np.arange(ops) * TENTH
    recorded["end"] = recorded["start"] + TENTH // 2
    return RankTrace(recorded, np.zeros(0, MEMORY), [""], samples=np.concatenate(samples))


@pytest.fixture
def trace() -> mk.Trace:
    meta = {"world_size": 2, "device": "cuda", "sampled_gpus": [FIRST, SECOND]}
    return mk.Trace([played(FIRST), played(SECOND)], meta)


def test_a_gpu_is_read_in_bytes_and_what_it_does_not_tell_is_nan() -> None:
    assert read_gpu(FakeNvml(), FIRST) == (0, 2e9)
    utilisation, memory = read_gpu(FakeNvml({"GPU-old": [{"utilisation": 7}]}), "GPU-old")
    assert utilisation == 7 and np.isnan(memory)


def test_ranks_find_their_gpu_by_uuid(nvml: FakeNvml) -> None:
    assert gpus_of(settings()) == [SECOND, FIRST]  # CUDA_VISIBLE_DEVICES=1,0
    assert gpus_of(settings(ranks=3, numbers=[1, 0])) == [FIRST, SECOND, FIRST]


def test_a_missing_package_is_said_with_its_command(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, trace: mk.Trace
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # `import pynvml` fails
    sampler = GpuSampler(settings())
    said = sampler.meta["gpus_not_sampled"]
    assert said == (
        "GPUs were not sampled (utilisation, memory in use): the package nvidia-ml-py is missing; "
        'pip install "mpkit[gpu]" installs it.'
    )
    bare = mk.Trace(
        [replace(rank, samples=rank.samples[:0]) for rank in trace.ranks], {**trace.meta, **sampler.meta}
    )
    timeline = mk.Timeline.of(bare)
    assert said in timeline.notes and said in " ".join(text(timeline, 100).split())
    assert not len(timeline.device_samples) and device_lines(timeline) == []


def test_each_ranks_file_grows_while_its_gpu_is_sampled(tmp_path: Path, nvml: FakeNvml) -> None:
    sampler = GpuSampler(settings(ranks=3, numbers=[1, 0]))
    sampler.start(tmp_path)
    wait_for(lambda: len(read(tmp_path, 0)) >= 3)
    sampler.close()
    assert nvml.open == 0
    first, other, shared = (read(tmp_path, rank) for rank in range(3))
    assert np.all(np.diff(first["time"]) > 0)
    assert first["memory"][0] == 2e9 and other["memory"][0] == 3.5e9
    assert first.tobytes() == shared.tobytes()  # ranks 0 and 2 share a GPU, which is asked once
    before = read(tmp_path, 0)
    sampler.close()
    assert len(read(tmp_path, 0)) == len(before)


def read(folder: Path, rank: int) -> np.ndarray:
    return read_rank(folder, rank).samples


def test_a_launch_samples_its_gpus_into_its_trace(
    cluster: mk.Cluster, monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml
) -> None:
    """The ranks are on CPUs, and the sampler asks FakeNvml as if they were not."""
    on_gpus = settings(cluster.ranks, numbers=[1, 0])
    monkeypatch.setattr("mpkit.launch.launch.GpuSampler", lambda _: GpuSampler(on_gpus))
    cluster.run(lambda ctx: ctx.rank)
    found = cluster.trace
    assert found.meta["sampled_gpus"] == [FIRST, SECOND] * (cluster.ranks // 2)
    assert all(len(rank.samples) >= 1 for rank in found.ranks)
    assert found.ranks[1].samples["memory"][0] == 3.5e9


def test_samples_are_on_the_measured_clock(trace: mk.Trace) -> None:
    timeline = mk.Timeline.of(trace)
    assert timeline.clock == "measured"
    mine = timeline.device_samples[timeline.device_samples["rank"] == 0]
    assert mine["time"] == pytest.approx(np.arange(1, 9) / 10)
    assert mine["utilisation"].tolist() == [0, 35, 88, 97, 96, 91, 40, 5]


def test_each_kind_of_sample_is_a_track(trace: mk.Trace) -> None:
    head, values = pack_tracks(mk.Timeline.of(trace))
    tracks = {track["name"]: track for track in head["tracks"]}
    assert list(tracks) == ["GPU utilisation", "GPU memory in use"]
    assert tracks["GPU utilisation"]["most"] == 100
    floats, at, found = np.frombuffer(values), 0, {}
    for track in head["tracks"]:
        for rank, count in track["ranks"]:
            width = len(track["keys"])
            levels = floats[at + count : at + count * (1 + width)].reshape(count, width)
            found[track["name"], rank] = floats[at : at + count], levels
            at += count * (1 + width)
    assert at == len(floats)
    times, levels = found["GPU utilisation", 0]
    assert times.tolist() == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    assert levels[:, 0].tolist() == [0, 35, 88, 97, 96, 91, 40, 5, 5]  # each over the time before it


def test_text_has_a_line_per_gpu(trace: mk.Trace) -> None:
    timeline = mk.Timeline.of(trace)
    cells = [re.split(r"  +", line) for line in device_lines(timeline)]
    assert cells == [
        ["GPU: mean (highest)", "utilisation", "memory in use", "samples"],
        ["GPU 0", "56 % (97 %)", "2.7 GiB (3.5 GiB)", "8"],
        ["GPU 1", "56 % (97 %)", "4.1 GiB (4.9 GiB)", "8"],
    ]
    assert device_lines(timeline)[0] in str(timeline)
