"""Tracks below a timeline, on its time axis: what each rank held of memory, and what NVML says of its GPU, as the
browser takes it.

    head    JSON: {tracks: [{name, unit, stacked, keys: [{word, light, dark}], ranks: [[rank, moments], ...]}, ...]},
            and `most`, what a lane reaches to at least; of memory `device`, the bytes of a device's, if known,
            and `told`, what there was at the peak
    bytes   of each track, rank by rank: times, (moments,) float64 seconds; levels, (moments, keys) float64

A sample speaks for the time since the sample before it, and is drawn there; in a terminal samples are a table.
All tracks of a timeline are sent together, as one trait, so a page that is loaded again has them at once.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mpkit.common.arrays import Array
from mpkit.common.table import table_text
from mpkit.common.units import memory_text
from mpkit.timeline.timeline import Timeline
from mpkit.trace import CATEGORIES
from mpkit.views.drawing.colours import CATEGORY_INKS, DEVICE_INKS
from mpkit.views.drawing.lanes import rank_label
from mpkit.views.memory.series import device_memory, fewer, memory_of, peak_words

Head = dict[str, Any]


class DeviceTrack(NamedTuple):
    """A track of a column of `DEVICE_SAMPLE`: its heading, unit and word, and what each lane reaches to at least."""

    column: str
    name: str
    unit: str
    word: str
    most: float = 0.0


TRACKS = (
    DeviceTrack("utilisation", "GPU utilisation", "%", "a kernel runs", 100.0),
    DeviceTrack("memory", "GPU memory in use", "B", "in use"),
)
"""All tracks."""


def _device_tracks(timeline: Timeline, points: int) -> list[tuple[dict[str, Any], bytes]]:
    """Return each track that any GPU tells something of: its head and its values, as `tracks.pack_tracks` has them."""
    packed = []
    for track in TRACKS:
        curves = [_curve(timeline, rank, track, points) for rank in range(timeline.world_size)]
        if any(len(times) for times, _ in curves):
            ranks = [[rank, len(times)] for rank, (times, _) in enumerate(curves) if len(times)]
            values = b"".join(times.tobytes() + levels.tobytes() for times, levels in curves)
            packed.append((_device_head(track) | {"ranks": ranks}, values))
    return packed


def _head(name: str, unit: str, inks: Mapping[str, tuple[str, str]], most: float = 0.0) -> Head:
    """Return the head of a track of which nothing is known yet: its name, its unit, and the colours of its words."""
    keys = [{"word": word, "light": light, "dark": dark} for word, (light, dark) in inks.items()]
    return {"name": name, "unit": unit, "stacked": True, "most": most, "keys": keys, "ranks": []}


def _memory_head(unit: str) -> Head:
    return _head("memory", unit, {word: CATEGORY_INKS[word] for word in CATEGORIES})


def _device_head(track: DeviceTrack) -> Head:
    return _head(track.name, track.unit, {track.word: DEVICE_INKS[track.column]}, track.most)


def _told(timeline: Timeline, rank: int, track: DeviceTrack) -> tuple[Array, Array]:
    """Return when a rank's GPU told of a track, and what."""
    samples = timeline.device_samples
    samples = samples[samples["rank"] == rank]
    samples = samples[~np.isnan(samples[track.column])]
    return samples["time"], samples[track.column]


def _curve(timeline: Timeline, rank: int, track: DeviceTrack, points: int) -> tuple[Array, Array]:
    """Return one rank's track as steps: times (n,), and the level from each on; none if nothing is known."""
    times, levels = _told(timeline, rank, track)
    if not len(times):
        return times, levels
    # The first sample speaks for as long as the median one does.
    length = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
    times = np.concatenate([[max(times[0] - length, 0.0)], times])
    levels = np.concatenate([levels, levels[-1:]])
    keep = fewer(times, levels, points)
    return times[keep], levels[keep]


def device_lines(timeline: Timeline) -> list[str]:
    """Return a table, a line per rank: mean and highest of what its GPU did; nothing without samples."""
    samples = timeline.device_samples
    tracks = [track for track in TRACKS if not np.isnan(samples[track.column]).all()] if len(samples) else []
    where = " in all steps" * (len(timeline.steps) > 1)
    rows = [
        [f"GPU{where}: mean (highest)", *(track.name.removeprefix("GPU ") for track in tracks), "samples"]
    ]
    for rank in np.unique(samples["rank"]).tolist():
        cells = [_mean_and_most(_told(timeline, rank, track)[1], track.unit) for track in tracks]
        rows.append([rank_label(timeline, rank), *cells, str(int((samples["rank"] == rank).sum()))])
    return table_text(rows) if len(samples) else []


def _mean_and_most(values: Array, unit: str) -> str:
    if not len(values):
        return "not told"
    mean, most = float(values.mean()), float(values.max())
    return f"{mean:.0f} % ({most:.0f} %)" if unit == "%" else f"{memory_text(mean)} ({memory_text(most)})"


MOMENTS = 24_000
"""The most moments of memory of all ranks together, and as many of GPUs: 1.2 MB, some hundred moments per step and rank
in a run of 50 steps."""


def expected_tracks(ranks: int, *, gpus: bool = False) -> Head:
    """Return the head of tracks of which nothing is known yet, so that their place is kept free.

    >>> expected_tracks(4)["tracks"][0]["ranks"]
    []
    """
    if not ranks:
        return {"tracks": []}
    return {"tracks": [_memory_head("B"), *(_device_head(track) for track in TRACKS[:-1] if gpus)]}


def has_tracks(timeline: Timeline) -> bool:
    """Return whether there is anything to draw below a timeline."""
    return bool(len(timeline.held) or len(timeline.device_samples))


def pack_tracks(timeline: Timeline) -> tuple[Head, bytes]:
    """Return the tracks of a timeline: their head and their values; of each stretch of time the highest is kept.

    >>> import mpkit as mk
    >>> head, values = pack_tracks(mk.simulate(mk.Plan.gpipe(2, 2)))
    >>> [track["name"] for track in head["tracks"]], len(values) == sum(n for _, n in head["tracks"][0]["ranks"]) * 48
    (['memory'], True)
    """
    each = max(MOMENTS // timeline.world_size, 60)
    packed = [_pack_memory(timeline, each)] if len(timeline.held) else []
    if len(timeline.device_samples):
        packed += _device_tracks(timeline, max(each // len(TRACKS), 60))
    return {"tracks": [head for head, _ in packed]}, b"".join(values for _, values in packed)


def _pack_memory(timeline: Timeline, each: int) -> tuple[Head, bytes]:
    head = _memory_head("" if timeline.clock == "simulated" else "B")
    if device := device_memory(timeline)[0]:
        head["device"] = device
    head["told"] = peak_words(timeline)
    origin = float(timeline.spans["start"].min()) if len(timeline.spans) else 0.0
    parts = []
    for rank in range(timeline.world_size):
        memory = memory_of(timeline, rank, points=each)
        head["ranks"].append([rank, len(memory.times)])
        parts += [(memory.times + origin).tobytes(), memory.levels.tobytes()]
    return head, b"".join(parts)
