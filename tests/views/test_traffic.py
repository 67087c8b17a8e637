"""Who sends how much to whom: matrices by axis."""

from __future__ import annotations

from collections.abc import Callable
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpkit as mk
from mpkit.devices.hardware import wire_factor
from mpkit.plan.mesh import Mesh
from mpkit.timeline.traffic import sent_to
from mpkit.trace import Kind

Meshed = Callable[..., mk.Timeline]
RINGS = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
ROOTED = (Kind.BROADCAST, Kind.REDUCE, Kind.SCATTER, Kind.GATHER)


def test_three_dimensions_have_a_matrix_each(meshed: Meshed) -> None:
    mesh = Mesh(pp=2, dp=2, tp=2)
    matrix = meshed(mesh).comm_matrix()
    assert matrix.axes == ["pp", "dp", "tp", "pp x dp x tp"]
    # 4 micro-batches, forward and backward, each an all-reduce of 1000 bytes between two: 2 (n-1)/n = 1.
    tp = np.zeros((8, 8))
    for rank in range(8):
        tp[rank, rank ^ 1] = 8 * 1000
    assert np.array_equal(matrix.by_axis["tp"], tp)
    # Messages go there and come back.
    pp = np.zeros((8, 8))
    for rank in range(4):
        pp[rank, rank + 4] = pp[rank + 4, rank] = 4 * 500
    assert np.array_equal(matrix.by_axis["pp"], pp)
    assert matrix.by_axis["dp"][0, 2] == matrix.by_axis["dp"][2, 0] == 4000
    # The world's ring passes every rank.
    assert [(int(row.argmax()), row.sum()) for row in matrix.by_axis["pp x dp x tp"]] == [
        ((rank + 1) % 8, 2 * 7 / 8 * 8) for rank in range(8)
    ]
    assert np.array_equal(matrix.bytes, sum(matrix.by_axis.values()))


@given(n=st.integers(2, 9), kind=st.sampled_from((*RINGS, *ROOTED, Kind.ALL_TO_ALL)), data=st.data())
def test_what_ranks_send_is_what_the_wire_factors_say(n: int, kind: Kind, data: st.DataObject) -> None:
    members = tuple(sorted(data.draw(st.sets(st.integers(0, 20), min_size=n, max_size=n))))
    root = data.draw(st.sampled_from(members))
    sent = {rank: list(sent_to(kind, members, rank, root)) for rank in members}
    for rank, to in sent.items():
        assert all(other in members and other != rank for other, _ in to)
        if kind in (*RINGS, Kind.ALL_TO_ALL):
            assert sum(share for _, share in to) == pytest.approx(wire_factor(kind, n))
    # With a root: whatever has to reach everybody, or to come from everybody.
    whole = sum(share for to in sent.values() for _, share in to)
    if kind in ROOTED:
        assert whole == pytest.approx(n - 1 if kind in (Kind.BROADCAST, Kind.REDUCE) else (n - 1) / n)
    assert not list(sent_to(Kind.BARRIER, members, root))


def test_text_svg_and_chart_show_the_same(meshed: Meshed) -> None:
    matrix = meshed(Mesh(pp=2, tp=2)).comm_matrix()
    text = str(matrix)
    assert "tp: 32.0 kB, 4 pairs" in text
    assert "kB  0  1  2  3\n 0  ·  8  ·  ·\n 1  8  ·  ·  ·\n" in text
    root = ElementTree.fromstring(matrix.to_svg())
    cells = root.findall(".//{http://www.w3.org/2000/svg}rect/{http://www.w3.org/2000/svg}title")
    assert "rank 0 (pp0 tp0) to rank 1 (pp0 tp1): 8.00 kB along tp" in [cell.text for cell in cells]
    figure = matrix.figure()
    assert [trace.type for trace in figure.data] == ["heatmap"] * 3
    assert figure.data[1].z[0][1] is not None and figure.data[1].z[0][0] is None
    assert "rank 0 (pp0 tp0) to rank 1 (pp0 tp1)" in figure.data[1].customdata[0][1]
    assert matrix._repr_mimebundle_()["text/plain"] == text
