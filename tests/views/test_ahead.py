"""Pictures of what is predicted, of long runs and of somebody else's traces: each says what its numbers say."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import mpkit as mk
from mpkit.common.display import draw
from mpkit.views.chart.svg import chart_svg
from mpkit.views.memory.charts import memory_over_time
from mpkit.views.memory.series import device_memory
from mpkit.views.timeline.svg import svg
from mpkit.views.timeline.tracks import pack_tracks
from tests.words import unwrapped

ASKED = {"global_batch": 8, "sequence": 4096}
PLAN = mk.Plan.zero(3, 8, precision="bf16")


def drawn_words(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize("machine", ["8x-a100-nvlink", "8x-rtx-4090"])
def test_the_picture_of_fits_has_the_numbers_of_its_text_in_one_unit(machine: str) -> None:
    found = mk.fits("llama3-8b", PLAN, machine, **ASKED)
    picture, text = draw(found, "svg"), str(found)
    (needed,) = re.findall(r": ([\d.]+ of [\d.]+ GiB) on rank 0", unwrapped(text))
    words = drawn_words(picture)
    assert words[0].startswith(f"llama3-8b {'fits' if found else 'does not fit'} {machine}: ")
    assert ("What would fit" if not found else "The largest batch that fits") in " ".join(words)
    assert f"band {found.relative_band:.0%}" in " ".join(words)
    assert sum(each.startswith(f"{needed}, ") for each in words) == 1  # at its bar
    for number, category in re.findall(r" +([\d.]+) GiB  (\w+):", text):
        assert f"{category} {number} GiB" in words
    assert not re.search(r"\d (GB|MB)\b", "".join(words))
    over = re.findall(r'class="over"', picture)
    assert len(over) == (0 if found else 1)


def test_an_estimate_is_a_picture_in_a_notebook_with_the_numbers_of_its_text() -> None:
    found = mk.estimate("llama3-8b", PLAN, "8x-a100-nvlink", **ASKED)
    bundle = found._repr_mimebundle_()
    assert bundle["text/plain"] == str(found) and bundle["text/html"].startswith("<img alt=")
    words = drawn_words(draw(found, "svg"))
    assert all(
        number in "".join(words) for number in re.findall(r"[\d.,]+ (?:ms|s|tokens/s|TFLOP/s)\b", str(found))
    )
    (because,) = (line for line in str(found).splitlines() if line.startswith("because"))
    for cause, share in re.findall(r"(?:^because +|, )([\w -]+) ([\d.]+ %)", because):
        assert any(each.startswith(cause) and each.endswith(f", {share}") for each in words), cause


def test_memory_says_its_share_of_the_device_where_the_machine_is_known() -> None:
    timeline = mk.simulate(mk.Plan.gpipe(2, 2))
    assert (
        "device" not in pack_tracks(timeline)[0]["tracks"][0]
        and "Percentages" not in memory_over_time(timeline).note
    )
    known = replace(timeline, clock="virtual", meta={"hardware": "2x-titan-rtx"})
    known.held["total"] *= 6_000_000_000
    assert device_memory(known) == (24_000_000_000, "TITAN RTX")
    assert pack_tracks(known)[0]["tracks"][0]["device"] == 24_000_000_000
    words = drawn_words(chart_svg(memory_over_time(known)))
    assert words.count("peak 11.2 GiB, 50.0 %") == 2
    told = " ".join(words)
    assert (
        "GPU 0 holds most: 11.2 GiB at 1.00 s, in forward of micro-batch 1; alive: micro-batches 0 and 1;"
        in told
    )
    assert "; activations 11.2 GiB. Percentages are of the 22.4 GiB of one TITAN RTX." in told


@pytest.mark.parametrize("width", [240, 420, 960])
def test_words_below_a_timeline_stay_inside_and_its_axis_has_a_number(width: int) -> None:
    timeline = mk.simulate(mk.Plan.gpipe(2, 2), 4.5, 4.5, 0.0)
    drawn = svg(replace(timeline, clock="measured", meta={"hardware": "8x-a100-nvlink"}), width)
    for x, words in re.findall(r'<text class="faint" x="([\d.]+)" y="[\d.]+">([^<]*)</text>', drawn):
        assert float(x) + 6.6 * len(words) <= width, words
    assert len([words for words in drawn_words(drawn) if re.fullmatch(r"\d+ s", words)]) >= 1
