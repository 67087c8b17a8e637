"""Reading files that are long, not quite JSON, cut short, or of other tools."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import mpkit as mk
from mpkit.errors import TraceError
from mpkit.timeline.foreign.stream import EventStream


def event(name: str = "aten::mm", **more: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "pid": 1,
        "tid": 1,
        "ts": 5.5,
        "dur": 2.0,
        "args": {},
        **more,
    }


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_events_and_header_come_out_in_any_order(tmp_path: Path) -> None:
    text = json.dumps(
        {"a": [1, {"b": 2}], "traceEvents": [event(), event("aten::add")], "z": "end"}, indent=1
    )
    stream = EventStream(written(tmp_path / "t.json", text))
    assert [each["name"] for each in stream] == ["aten::mm", "aten::add"]
    assert stream.header == {"a": [1, {"b": 2}], "z": "end"}
    assert not +stream.repairs


def test_pieces_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(
        {"traceEvents": [event(f'op {i} \\ "é', args={"n": i}) for i in range(50)], "last": 12345}
    )
    path = written(tmp_path / "t.json", text)
    for piece in (1, 7, 64):
        monkeypatch.setattr("mpkit.timeline.foreign.stream.PIECE", piece)
        stream = EventStream(path)
        assert [each["args"]["n"] for each in stream] == [*range(50)]
        assert stream.header == {"last": 12345}


def test_what_public_tools_mend_is_mended_and_said(tmp_path: Path) -> None:
    broken = json.dumps([event(args={"Process Group Description": "X", "dtype": "Float"}), event("C:PATHx")])
    broken = broken.replace('"X", "dtype"', ', "dtype"').replace("C:PATHx", "C:\\data\\new")
    stream = EventStream(written(tmp_path / "t.json", broken))
    first, second = stream
    assert first["args"] == {"Process Group Description": "", "dtype": "Float"}
    assert second["name"] == "C:\\data\new"
    assert +stream.repairs == {"empty value": 1, "backslash that escapes nothing": 1}


@pytest.mark.parametrize("zipped", [False, True])
def test_a_file_that_was_cut_is_read_as_far_as_it_goes(tmp_path: Path, zipped: bool) -> None:
    whole = json.dumps({"traceEvents": [event(f"aten::op{i}") for i in range(500)]}).encode()
    path = tmp_path / "t.json"
    path.write_bytes(gzip.compress(whole)[:-600] if zipped else whole[:-100])
    stream = EventStream(path)
    found = len(list(stream))
    assert (1 if zipped else 497) <= found < 500
    assert stream.repairs["end that was cut off"] == 1
    trace = mk.open(path)
    assert any("was fixed: end that was cut off (1)" in note for note in trace.notes)


def test_traces_of_other_tools_are_refused_with_who_shows_them(tmp_path: Path) -> None:
    spans = [{"ph": "X", "cat": "own", "name": "outer", "pid": 7, "tid": 1, "ts": 0, "dur": 10}]
    with pytest.raises(
        TraceError, match=r"spans\.json: there are no events .*, but own\. .*perfetto\.dev shows"
    ):
        mk.open(written(tmp_path / "spans.json", json.dumps(spans)))


def test_what_is_no_trace_is_refused_with_what_would_work(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        mk.open(tmp_path / "nothing.json")
    with pytest.raises(TraceError, match="export_chrome_trace"):
        mk.open(tmp_path)
    with pytest.raises(TraceError, match="no events"):
        mk.open(written(tmp_path / "empty.json", "{}"))
    for name in ("a.json", "b.json"):
        written(tmp_path / name, json.dumps({"distributedInfo": {"rank": 3}, "traceEvents": [event()]}))
    with pytest.raises(TraceError, match=r"a\.json, b\.json are all of rank 3"):
        mk.open([tmp_path / "a.json", tmp_path / "b.json"])
