"""Facts of real traces, which lie beside the repository where there are any; see their README."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpkit as mk
from mpkit.timeline.foreign.communication import communications
from mpkit.timeline.foreign.rank_identity import read_header
from mpkit.timeline.foreign.reading.events import Events
from mpkit.timeline.foreign.reading.reader import read_events
from mpkit.trace import Kind

GIVEN = Path(__file__).parents[2].parent / "shared" / "traces"

pytestmark = pytest.mark.skipif(not GIVEN.is_dir(), reason="the given traces are not beside the repository")

BUCKETS = [2049000, 7875584, 6563840, 6637568, 2431040]


@pytest.fixture(scope="module")
def resnet() -> Events:
    return read_events(GIVEN / "nccl_data.json.gz")


def test_every_kernel_finds_its_runtime_call_and_its_operator(resnet: Events) -> None:
    assert len(resnet["kernel"]) == 2700
    assert (resnet.launches("kernel") >= 0).sum() == 2700
    assert (resnet.operators("kernel") >= 0).sum() == 2700


def test_idle_time_is_what_hta_says_and_the_host_is_late() -> None:
    """HolisticTraceAnalysis: 338,781 of 435,586 us idle, 75,169 computing, without the last profiled step."""
    timeline = mk.Timeline.of(mk.open(GIVEN / "nccl_data.json.gz"))
    busy = [timeline.step(step).busy[0] for step in timeline.steps[:-1]]
    assert 1e6 * sum(busy) == pytest.approx(75_169, rel=0.03)
    path = timeline.critical_path()
    assert path.graph.ends == pytest.approx(path.graph.end - path.graph.begin, abs=1e-6)
    assert timeline.diagnose()[0].kind == "host-bound"


def test_collectives_are_ddps_buckets_and_buffers(resnet: Events) -> None:
    who = read_header(resnet.header, GIVEN / "nccl_data.json.gz")
    found = communications(resnet, who)
    reduced = [comm.call for comm in found if comm.kind == Kind.ALL_REDUCE]
    assert [call.elements for call in reduced] == BUCKETS * 3
    assert sum(BUCKETS) == 25_557_032
    assert {(call.members, call.dtype) for call in reduced} == {((0, 1), "float")}
    sent = [(comm.call.elements, comm.call.dtype) for comm in found if comm.kind == Kind.BROADCAST]
    assert sent == [(53_120, "float"), (53, "long")] * 3


def test_resnet_is_on_a_timeline() -> None:
    trace = mk.open(GIVEN / "nccl_data.json.gz")
    timeline = trace.timeline()
    assert timeline.steps == [4, 5, 6]
    assert timeline.comm_bytes[0]["all_reduce"] == 4 * sum(BUCKETS)
    assert trace.meta["hardware"] == "8x-a100-40-nvlink"
    assert "1 of 2 ranks" in trace.notes[0]


@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        ("cpu_only_rank-34_of_300", [34], "1 of 300 ranks"),
        ("rank_not_found", [None], "is not in the file"),
        ("distributed_info_not_found", [None], "is not in the file"),
        ("rank_non_gpu", [0], ""),
        ("ns_resolution_rank-0", [0], ""),
    ],
)
def test_it_opens_as_what_it_is(name: str, ranks: list[int | None], words: str) -> None:
    trace = mk.open(GIVEN / f"{name}.json.gz")
    assert trace.meta["imported"]["ranks"] == ranks
    assert any(words in note for note in [*trace.notes, ""])
    assert trace.timeline().to_svg().startswith("<svg")


def test_two_of_128_ranks() -> None:
    trace = mk.open([GIVEN / "sampled_rank-0.json.gz", GIVEN / "sampled_rank-1.json.gz"])
    assert "2 of 128 ranks: ranks 0, 1" in trace.notes[0]
    assert trace.world_size == 2
    assert {"all_to_all", "all_reduce", "all_gather"} == {*trace.timeline().comm_bytes[0]}


def test_memory_curve_of_an_inference() -> None:
    trace = mk.open(GIVEN / "h100_qwen_single_gpu.json.gz")
    timeline = trace.timeline()
    assert timeline.comm_bytes == [{}]
    assert trace.meta["imported"]["gpu"] == "NVIDIA H100 80GB HBM3"
    assert trace.meta["imported"]["reserved"] == [2_629_828_608]
    assert timeline.peak_memory[0]["total"] < 2_629_828_608
    assert len(timeline.held) > 2000


@pytest.mark.parametrize("name", ["nccl_data", "h100_qwen_single_gpu", "sampled_rank-0"])
def test_every_view_draws_it(name: str, tmp_path: Path) -> None:
    trace = mk.open(GIVEN / f"{name}.json.gz")
    timeline = trace.timeline()
    assert "rank" in str(timeline)
    assert timeline.to_html().startswith("<!")
    assert timeline.to_perfetto(tmp_path / "all.json").stat().st_size > 1000
    assert len(timeline.to_dataframe())
    assert "8x-h100" in str(timeline.meta["hardware"]) or trace.timeline("8x-h100-nvlink").step_time > 0
    assert "imported" in str(mk.compare(imported=trace, again=trace))
