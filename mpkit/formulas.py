"""What the papers say a rank sends in a step, by axis and kind of communication, from what a trace's meta knows.

    tp    4 all-reduces of b s h elements a layer a micro-batch, two forward and two backward: 8 b s h (t-1)/t;
          one for a divided embedding, forward, and one for a divided head, backward
          with sequence parallelism 2 all-gathers and 2 reduce-scatters a region (2 regions a layer), which is as much,
          an all-gather more for the gradients of the weights, and one at each end of the divided sequence
    dp    all-reduce 2 psi (n-1)/n; ZeRO-1 and -2 the same in two halves; ZeRO-3 gathers twice: 3 psi (n-1)/n
    pp    b s h elements a boundary a micro-batch, forward and backward
    cp    keys and values once round the ring forward; backward again, and their gradients

Sources: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2; Rajbhandari et al. 2020, section 7;
Narayanan et al. 2021, section 3.2; Liu et al. 2023, section 3.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from mpkit.mesh import Mesh
from mpkit.trace import Kind
from mpkit.whereabouts import holders_of, mesh_of

if TYPE_CHECKING:
    from mpkit.tensor_plan import TensorPlan

__all__ = ["Formula", "Known", "formula_of", "pairs_by_stage"]


class Formula(NamedTuple):
    """A volume in theory.

    Attributes:
        symbols: as the papers write it, in elements.
        words: what is sent.
        of: bytes on the wire that a rank sends in a step, by the rank.
    """

    symbols: str
    words: str
    of: Callable[[int], float]


@dataclass(frozen=True)
class Known:
    """What formulas need, as far as it is known.

    Attributes:
        mesh: of the run.
        plan: its plan's fields.
        holders: by stage, the place along pp that holds it.
        params: by rank, the elements of the parameters that it holds a replica of.
        element: bytes of one.
        stream: bytes of b s h, one micro-batch's activations between layers, of one replica.
        regions: by stage, how many pairs of f and g it has: 2 a transformer layer.
        embeddings, heads: by stage, how many of them are divided by vocabulary.
        keys_values: by stage, bytes of one micro-batch's keys and values in all its attentions, the whole sequence.
    """

    mesh: Mesh
    plan: Mapping[str, Any]
    holders: Sequence[int]
    params: Sequence[int] = ()
    element: int = 0
    stream: float = 0.0
    regions: Sequence[int] = ()
    embeddings: Sequence[int] = ()
    heads: Sequence[int] = ()
    keys_values: Sequence[float] = field(default=())

    @classmethod
    def of(cls, meta: Mapping[str, Any], ranks: int) -> Known | None:
        """What a trace's meta tells: its "plan" and "mesh"; None without a plan."""
        mesh = mesh_of(meta, ranks)
        if mesh is None:
            return None
        plan, told = json.loads(meta["plan"]), dict(meta.get("mesh") or {})
        params, element = told.get("local_params"), told.get("element_bytes")
        if params is None and mesh.pp == mesh.tp == 1 and "parameters" in meta:
            params = [int(meta["parameters"])] * ranks  # each rank is a replica of the whole
            element = _BYTES.get(str(meta.get("dtype")), 0)
        return cls(
            mesh, plan, holders_of(meta), params or (), int(element or 0),
            stream=float(told.get("stream_bytes") or 0), regions=told.get("layers_tp") or (),
            embeddings=told.get("embeddings_tp") or (), heads=told.get("heads_tp") or (),
            keys_values=told.get("kv_bytes") or (),
        )  # fmt: skip

    @property
    def microbatches(self) -> int:
        """How many a step: m."""
        return int(self.plan.get("microbatches", 1))

    @property
    def again(self) -> int:
        """Forwards of a stage that are done again before its backward."""
        return int(self.plan.get("recompute") == "full")

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds."""
        place = self.mesh.place(rank).pp
        return [stage for stage, holder in enumerate(self.holders) if holder == place]

    def total(self, by_stage: Sequence[float], rank: int) -> float:
        """What a rank's stages have together; 0 of what is not known."""
        return sum(by_stage[stage] for stage in self.stages_of(rank)) if by_stage else 0.0


_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def formula_of(known: Known | None, axis: str, kind: Kind) -> Formula | None:
    """What a rank should send by this kind along this axis; None where nothing is known of it."""
    if known is None:
        return None
    replicas = " x ".join(name for name in ("dp", "cp") if getattr(known.mesh, name) > 1)
    if axis == "tp":
        return _tensor(known, kind)
    if axis == "pp" and kind == Kind.SEND:
        return _pipeline(known)
    if axis == "cp" and kind == Kind.SEND:
        return _context(known)
    return _replicas(known, kind) if axis == replicas else None


class _Passes(NamedTuple):
    """How often all of b s h passes round the ring in a micro-batch, as in an all-gather.

    Attributes:
        region: for each region; 2 of them are a layer.
        others: by stage, for what else.
        symbols: of what else.
        words: what it is.
    """

    region: int
    others: Sequence[float]
    symbols: str
    words: str


def _whole_sequence(known: Known) -> dict[Kind, _Passes]:
    """With f and g: each is an all-reduce, which is two passes."""
    others = [2.0 * count for count in _vocabulary(known)]
    more = "2 an embedding or head" if any(others) else ""
    words = "all-reduces: of partial sums forward, of gradients backward"
    return {Kind.ALL_REDUCE: _Passes(2 * (2 + known.again), others, more, words)}


def _divided_sequence(known: Known) -> dict[Kind, _Passes]:
    """With f_bar and g_bar within the divided sequence; its ends; and the vocabulary, which is outside of it."""
    last = len(known.holders) - 1
    ends = [float((stage == 0) + (stage == last) * (1 + known.again)) for stage in range(last + 1)]
    gathers = "all-gathers: into a region, back out of it, again for its weights"
    scatters = "reduce-scatters: out of a region, and of gradients back out of its beginning"
    vocabulary = [2.0 * count for count in _vocabulary(known)]
    return {
        Kind.ALL_REDUCE: _Passes(0, vocabulary, "2 an embedding or head", "outside of the divided sequence"),
        Kind.ALL_GATHER: _Passes(3 + known.again, ends, "1 at each end", gathers),
        Kind.REDUCE_SCATTER: _Passes(2 + known.again, (), "", scatters),
    }


def _vocabulary(known: Known) -> list[int]:
    """All-reduces by stage: an embedding's forward, a head's backward."""
    both = zip(known.embeddings, known.heads, strict=False)
    return [embeddings * (1 + known.again) + heads for embeddings, heads in both]


def _tensor(known: Known, kind: Kind) -> Formula | None:
    """What the regions send, and what else there is."""
    divided = bool(known.plan.get("sequence_parallel"))
    passes = (_divided_sequence(known) if divided else _whole_sequence(known)).get(kind)
    if passes is None or not known.stream or not _by_stage(known, known.regions):
        return None
    if not passes.region and not any(passes.others):
        return None
    t = known.mesh.tp
    once = known.stream / known.mesh.cp * (t - 1) / t
    unit = "b s h (t-1)/t"
    symbols = f"{2 * passes.region} {unit} a layer" if passes.region else ""
    if passes.symbols:
        number, _, what = passes.symbols.partition(" ")
        symbols += f", {passes.symbols}" if symbols else f"{number} {unit} {what}"

    def volume(rank: int) -> float:
        each = passes.region * known.total(known.regions, rank) + known.total(passes.others, rank)
        return known.microbatches * each * once

    return Formula(f"{symbols}, a micro-batch", passes.words, volume)


def _pipeline(known: Known) -> Formula | None:
    """A boundary is between stages that different ranks hold."""
    if not known.stream:
        return None
    divided = known.mesh.tp if known.plan.get("sequence_parallel") else 1
    message = known.stream / known.mesh.cp / divided
    ends = [pair for pair in pairwise(known.holders) if pair[0] != pair[1]]
    symbols = f"b s h{' / t' if divided > 1 else ''} a boundary a micro-batch, each way"

    def volume(rank: int) -> float:
        place = known.mesh.place(rank).pp
        return sum(place in pair for pair in ends) * known.microbatches * message

    return Formula(symbols, "activations to the next stage, their gradients to the one before", volume)


def _replicas(known: Known, kind: Kind) -> Formula | None:
    n, m = known.mesh.dp * known.mesh.cp, known.microbatches
    zero = int(known.plan.get("zero", 0))
    every = f"{m} x " if m > 1 else ""  # ZeRO-2 and -3 have nowhere to accumulate whole gradients
    by_kind = {
        (0, Kind.ALL_REDUCE): (2, "2 psi (n-1)/n", "gradients, summed over the replicas"),
        (1, Kind.REDUCE_SCATTER): (1, "psi (n-1)/n", "gradients, to who updates them"),
        (1, Kind.ALL_GATHER): (1, "psi (n-1)/n", "updated parameters, to all"),
        (2, Kind.REDUCE_SCATTER): (
            m,
            f"{every}psi (n-1)/n",
            "gradients of each micro-batch, to who keeps them",
        ),
        (2, Kind.ALL_GATHER): (1, "psi (n-1)/n", "updated parameters, to all"),
        (3, Kind.REDUCE_SCATTER): (
            m,
            f"{every}psi (n-1)/n",
            "gradients of each micro-batch, to who keeps them",
        ),
        (3, Kind.ALL_GATHER): (
            2 * m,
            f"{every}2 psi (n-1)/n",
            "parameters before each forward and each backward",
        ),
    }
    if (zero, kind) not in by_kind or not known.params or known.plan.get("data_parallel", "ddp") != "ddp":
        return None
    times, symbols, words = by_kind[zero, kind]
    return Formula(symbols, words, lambda rank: times * known.params[rank] * known.element * (n - 1) / n)


def _context(known: Known) -> Formula | None:
    if not _by_stage(known, known.keys_values):
        return None
    c, wide = known.mesh.cp, max(4, known.element) / (known.element or 4)  # gradients go in fp32 at least
    times = 2 + known.again + wide
    return Formula(
        f"{times:g} |K, V| (c-1)/c an attention a micro-batch",
        "keys and values round the ring: forward, backward, and their gradients",
        lambda rank: known.total(known.keys_values, rank) * known.microbatches * times * (c - 1) / c,
    )


def _by_stage(known: Known, values: Sequence[float]) -> bool:
    return len(values) == len(known.holders)


def pairs_by_stage(tensor: TensorPlan, stages: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    """How many regions, divided embeddings and divided heads each stage has: for a trace's meta["mesh"].

    Args:
        tensor: with the model's own names, as `mpkit.parallel.tensor.check` gives it.
        stages: the names of the layers, by stage.
    """

    def among(names: Sequence[str], stage: Sequence[str]) -> int:
        return sum(any(name == layer or name.startswith(f"{layer}.") for layer in stage) for name in names)

    regions = [region.entry for region in tensor.regions]
    heads = [] if tensor.head is None else [tensor.head]
    of = {"layers_tp": regions, "embeddings_tp": tensor.embeddings, "heads_tp": heads}
    return {name: [among(names, stage) for stage in stages] for name, names in of.items()}
