"""Pictures of what is predicted, of long runs and of somebody else's traces: each says what its numbers say."""

from __future__ import annotations

import re

import pytest

import mpkit as mk
from mpkit.common.display import draw
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
