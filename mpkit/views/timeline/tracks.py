"""Tracks below a timeline, on its time axis: what each rank held of memory, and what NVML says of its GPU, as the
browser takes it.

    head    JSON: {tracks: [{name, unit, stacked, keys: [{word, light, dark}], ranks: [[rank, moments], ...]}, ...]},
            and `most`, what a lane reaches to at least; of memory `device`, the bytes of a device's, if known,
            `repeats`, from when on it was not measured, and `told`, what there was at the peak
    bytes   of each track, rank by rank: times, (moments,) float64 seconds; levels, (moments, keys) float64

All tracks of a timeline are sent together, as one trait, so a page that is loaded again has them at once.
"""

from __future__ import annotations

from math import inf
from typing import Any

from mpkit.timeline.timeline import Timeline
from mpkit.trace import CATEGORIES
from mpkit.views.drawing.colours import CATEGORY_INKS
from mpkit.views.memory.peak import peak_words, repeated_from
from mpkit.views.memory.series import device_memory, memory_of
from mpkit.views.timeline.device_samples import TRACKS, device_tracks, head_of

__all__ = ["MOMENTS", "expected_tracks", "has_tracks", "pack_tracks"]

MOMENTS = 24_000
"""The most moments of all ranks together: 1.2 MB, some hundred moments per step and rank in a run of 50 steps."""

Head = dict[str, Any]


def expected_tracks(ranks: int, *, gpus: bool = False) -> Head:
    """Return the head of tracks of which nothing is known yet, so that their place is kept free.

    Args:
        ranks: the number of ranks.
        gpus: whether their GPUs are sampled.

    >>> expected_tracks(4)["tracks"][0]["ranks"]
    []
    """
    if not ranks:
        return {"tracks": []}
    return {"tracks": [_memory_head("B"), *(head_of(track) for track in TRACKS[:-1] if gpus)]}


def has_tracks(timeline: Timeline) -> bool:
    """Return whether there is anything to draw below a timeline."""
    return bool(len(timeline.held) or len(timeline.device_samples))


def pack_tracks(timeline: Timeline, moments: int = MOMENTS) -> tuple[Head, bytes]:
    """Return the tracks of a timeline: their head and their values.

    Args:
        timeline: whose memory, and whose GPUs.
        moments: the most moments of memory of all ranks together, and as many of GPUs; of each stretch of time the
            highest is kept.

    >>> import mpkit as mk
    >>> head, values = pack_tracks(mk.simulate(mk.Plan.gpipe(2, 2)))
    >>> [track["name"] for track in head["tracks"]], len(values) == sum(n for _, n in head["tracks"][0]["ranks"]) * 48
    (['memory'], True)
    """
    each = max(moments // timeline.world_size, 60)
    packed = [_pack_memory(timeline, each)] if len(timeline.held) else []
    if len(timeline.device_samples):
        packed += device_tracks(timeline, max(each // len(TRACKS), 60))
    return {"tracks": [head for head, _ in packed]}, b"".join(values for _, values in packed)


def _pack_memory(timeline: Timeline, each: int) -> tuple[Head, bytes]:
    head = _memory_head("" if timeline.clock == "simulated" else "B")
    if device := device_memory(timeline)[0]:
        head["device"] = device
    repeats = repeated_from(timeline)
    if repeats < inf:
        head["repeats"] = repeats
    head["told"] = peak_words(
        timeline
    ) + " Paler: steps that were not measured, drawn as an earlier one was." * (repeats < inf)
    origin = float(timeline.spans["start"].min()) if len(timeline.spans) else 0.0
    parts = []
    for rank in range(timeline.world_size):
        memory = memory_of(timeline, rank, points=each)
        head["ranks"].append([rank, len(memory.times)])
        parts += [(memory.times + origin).tobytes(), memory.levels.tobytes()]
    return head, b"".join(parts)


def _memory_head(unit: str) -> Head:
    keys = [
        {"word": word, "light": light, "dark": dark}
        for word, (light, dark) in ((word, CATEGORY_INKS[word]) for word in CATEGORIES)
    ]
    return {"name": "memory", "unit": unit, "stacked": True, "keys": keys, "ranks": []}
