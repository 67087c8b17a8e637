"""What a rank sends in a step according to the papers, by axis and kind of communication, computed from a trace's meta.

    tp    4 all-reduces of b s h elements per layer and micro-batch, two forward and two backward: 8 b s h (t-1)/t;
          one for a divided embedding, forward, one for a divided head, backward; 3 of b s for the cross-entropy
          with sequence parallelism, per region (2 per layer), 2 all-gathers and 2 reduce-scatters, the same volume,
          one more all-gather for the weight gradients, one at each end of the divided sequence, and once per step
          an all-reduce of the gradients of what each rank applies to its own part (layer norms, biases)
          experts that tp divides are a region too, whose inputs are also the T k weights of tokens' choices
    dp    all-reduce: 2 psi (n-1)/n; ZeRO-1 and -2: the same in two halves; ZeRO-3 gathers twice: 3 psi (n-1)/n, and
          once more what is recomputed. Hybrid sharding: the same within groups of n = dp_shard; and the shards'
          gradients over the r = dp_replicate groups, once per step: 2 psi/n (r-1)/r.
    pp    b s h elements per boundary and micro-batch, forward and backward
    ep    two all-to-alls of T k h elements per layer with experts, forward and backward: 4 T k h (ep-1)/ep, and one of
          the numbers of rows by expert; experts' gradients are summed over the edp ranks that hold the same ones.
          Where experts have copies, their weights travel once per step, and their gradients back
    cp    keys and values once round the ring in the forward, again in the backward, and their gradients; under Ulysses
          4 all-to-alls of b s h / c elements per attention, forward and backward: 8 b s h / c (c-1)/c

Sources: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2; Rajbhandari et al. 2020, section 7;
Narayanan et al. 2021, section 3.2; Liu et al. 2023, section 3; Liu et al., arXiv 2504.14960, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from mpkit.plan.axes import join_axes
from mpkit.plan.mesh_of_trace import long_axes
from mpkit.timeline.formula_inputs import FormulaInputs
from mpkit.trace import Kind

__all__ = ["Formula", "FormulaInputs", "formula_of"]


class Formula(NamedTuple):
    """A volume according to theory.

    Attributes:
        symbols: the formula as the papers write it, in elements.
        words: what is sent.
        of: a function from a rank to the bytes that it sends on the wire in a step.
    """

    symbols: str
    words: str
    of: Callable[[int], float]


def formula_of(known: FormulaInputs | None, axis: str, kind: Kind) -> Formula | None:
    """Return the formula for what a rank should send by this kind along this axis; None where none is known."""
    if known is None:
        return None
    long = long_axes(known.mesh)
    shard_group = join_axes(name for name in known.mesh.parts("dp_shard", "cp") if name in long)
    if axis == "tp":
        return _tensor(known, kind)
    if axis == "pp" and kind == Kind.SEND:
        return _pipeline(known)
    if axis in ("cp", "edp") and kind in (Kind.SEND, Kind.ALL_TO_ALL):
        return _context(known, kind)
    if axis == "dp_replicate" and kind == Kind.ALL_REDUCE:
        return _over_groups(known)
    if axis == "ep" and kind == Kind.ALL_TO_ALL:
        return _exchanges(known)
    if axis in (shard_group, "edp"):
        return _replicas(known, kind, of_experts=axis == "edp")
    return None


class _Passes(NamedTuple):
    """How often all of b s h travels round the ring per micro-batch, as in an all-gather.

    Attributes:
        region: passes per region; a layer has 2 regions.
        others: by stage, passes for everything else.
        symbols: the formula of everything else.
        words: what is sent.
        loss: bytes sent round the ring for the loss, on the last stage.
        step: by stage, bytes sent round the ring once per step.
    """

    region: float
    others: Sequence[float]
    symbols: str
    words: str
    loss: float = 0.0
    step: Sequence[float] = ()


def _whole_sequence(known: FormulaInputs) -> dict[Kind, _Passes]:
    """Return the passes with f and g; each is an all-reduce, which counts as two passes."""
    others = [2.0 * count for count in _vocabulary(known)]
    more = "2 an embedding or head" if any(others) else ""
    words = "all-reduces: of partial sums forward, of gradients backward"
    reduced, gathered = _of_loss(known)
    return {
        Kind.ALL_REDUCE: _Passes(2 * (2 + known.recomputations), others, more, words, reduced),
        Kind.ALL_GATHER: _Passes(0, (), "", "logits, for a loss that asks for the whole", gathered),
    }


def _divided_sequence(known: FormulaInputs) -> dict[Kind, _Passes]:
    """Return the passes with f_bar and g_bar inside the divided sequence, at its ends, and for the vocabulary outside
    it.
    """
    last = len(known.holders) - 1
    ends = [float((stage == 0) + (stage == last) * (1 + known.ends_again)) for stage in range(last + 1)]
    gathers = "all-gathers: into a region, back out of it" + ", again for its weights" * known.gathers_again
    scatters = "reduce-scatters: out of a region, and of gradients back out of its beginning"
    vocabulary = [2.0 * count for count in _vocabulary(known)]
    outside = "outside of the divided sequence, and gradients of what is used on a part of it"
    reduced, gathered = _of_loss(known)
    step = [2.0 * size for size in known.partial]
    return {
        Kind.ALL_REDUCE: _Passes(0, vocabulary, "2 an embedding or head", outside, reduced, step),
        Kind.ALL_GATHER: _Passes(
            2 + known.gathers_again + known.recomputations, ends, "1 at each end", gathers, gathered
        ),
        Kind.REDUCE_SCATTER: _Passes(2 + known.recomputations, (), "", scatters),
    }


def _vocabulary(known: FormulaInputs) -> list[int]:
    """Return the number of all-reduces by stage: an embedding's in the forward, a head's in the backward."""
    both = zip(known.embeddings, known.heads, strict=False)
    return [embeddings * (1 + known.ends_again) + heads for embeddings, heads in both]


def _of_loss(known: FormulaInputs) -> tuple[float, float]:
    """Return the bytes sent for the loss: in all-reduces, and in all-gathers."""
    reduced, gathered = known.loss
    return 2.0 * reduced * (1 + known.ends_again), gathered * (1 + known.ends_again)


def _tensor(known: FormulaInputs, kind: Kind) -> Formula | None:
    """Return the formula along tp: what the tensor-parallel regions send, and everything else along that axis."""
    divided = bool(known.plan.get("sequence_parallel"))
    passes = (_divided_sequence(known) if divided else _whole_sequence(known)).get(kind)
    if passes is None or not known.stream or not _by_stage(known, known.regions):
        return None
    if not passes.region and not any((*passes.others, passes.loss, *passes.step)):
        return None
    once = (known.mesh.tp - 1) / known.mesh.tp
    stream = known.stream / known.mesh.cp

    experts = _expert_regions(known, kind, divided=divided)

    def volume(rank: int) -> float:
        layers = passes.region * known.total(known.regions, rank) + known.total(passes.others, rank)
        loss = experts(rank) + passes.loss * (len(known.holders) - 1 in known.stages_of(rank))
        step = known.total(passes.step, rank) / known.shares
        return (known.microbatches * (layers * stream + loss) + step) * once

    more = ", T k more of experts" * any(map(experts, range(known.mesh.size)))
    return Formula(_symbols(passes) + more, passes.words, volume)


def _expert_regions(known: FormulaInputs, kind: Kind, *, divided: bool) -> Callable[[int], float]:
    """Return the bytes that go round the ring per micro-batch for experts that are divided along tp.

    Where the sequence is divided, tokens are gathered with the numbers of their experts.
    """
    again = known.recomputations
    times, weights, numbers = {
        (False, Kind.ALL_REDUCE): (2 * (2 + again), 2.0, 0.0),
        (True, Kind.ALL_GATHER): (2 + again, 1 + again, 8 * (1 + again)),
        (True, Kind.REDUCE_SCATTER): (2 + again, 1.0, 0.0),
    }.get((divided, kind), (0.0, 0.0, 0.0))

    def volume(rank: int) -> float:
        layers, choices = known.total(known.expert_regions, rank), known.total(known.choices, rank)
        return (times * layers * known.stream + choices * (weights * known.element + numbers)) / known.mesh.cp

    return volume


def _symbols(passes: _Passes) -> str:
    """Write the formula as the papers do."""
    unit = "b s h (t-1)/t"
    told = [f"{2 * passes.region:g} {unit} a layer"] if passes.region else []
    if passes.symbols:
        number, _, what = passes.symbols.partition(" ")
        told.append(f"{number} {what}" if told else f"{number} {unit} {what}")
    if not told and not passes.loss:
        return "2 psi (t-1)/t of them, a step"
    return f"{', '.join(told) or 'b s V (t-1)/t'}, a micro-batch"


def _pipeline(known: FormulaInputs) -> Formula | None:
    """Return the formula along pp: every boundary between stages that different ranks hold adds to it."""
    if not known.stream:
        return None
    divided = known.mesh.tp if known.plan.get("sequence_parallel") else 1
    message = known.stream / known.mesh.cp / divided
    ends = [pair for pair in pairwise(known.holders) if pair[0] != pair[1]]
    symbols = f"b s h{' / t' if divided > 1 else ''} a boundary a micro-batch, each way"

    def volume(rank: int) -> float:
        place = known.mesh.place(rank).pp
        tied = known.value_at(known.tied, rank) / known.shares
        return sum(place in pair for pair in ends) * known.microbatches * message + tied

    words = "activations to the next stage, their gradients to the one before"
    if any(known.tied):
        symbols, words = (
            f"{symbols}; psi a tied weight",
            f"{words}; tied weights' gradients, and what they become",
        )
    return Formula(symbols, words, volume)


def _replicas(known: FormulaInputs, kind: Kind, *, of_experts: bool = False) -> Formula | None:
    """Return the formula over the ranks among which ZeRO shards, for all parameters but experts or for these."""
    mesh, m = known.mesh, known.microbatches
    n = mesh.edp if of_experts else mesh.dp_shard * mesh.cp
    # Where tp is folded, the ranks that hold the same experts can be those that hold the same of all else.
    both = of_experts and mesh.groups("edp") == mesh.groups("dp_shard", "cp")
    zero = int(known.plan.get("zero", 0))
    every = f"{m} x " if m > 1 else ""  # ZeRO-2 and -3 have nowhere to accumulate full gradients
    gathers = 2 + known.ends_again  # recomputing a block needs no gather of its own
    halves = ", once more where it is split" if any(known.split) else ""
    by_kind = {
        (0, Kind.ALL_REDUCE): (2, "2 psi (n-1)/n", "gradients, summed over the replicas"),
        (1, Kind.REDUCE_SCATTER): (1, "psi (n-1)/n", "gradients, to who updates them"),
        (1, Kind.ALL_GATHER): (1, "psi (n-1)/n", "updated parameters, to all"),
        (2, Kind.REDUCE_SCATTER): (m, f"{every}psi (n-1)/n", "gradients of each micro-batch, to who keeps them"),
        (2, Kind.ALL_GATHER): (1, "psi (n-1)/n", "updated parameters, to all"),
        (3, Kind.REDUCE_SCATTER): (m, f"{every}psi (n-1)/n", "gradients of each micro-batch, to who keeps them"),
        (3, Kind.ALL_GATHER): (
            gathers * m,
            f"{every}{gathers} psi (n-1)/n",
            f"parameters before each forward and each backward{halves}",
        ),
    }  # fmt: skip
    if (zero, kind) not in by_kind or not known.params or known.plan.get("data_parallel", "ddp") != "ddp":
        return None
    times, symbols, words = by_kind[zero, kind]
    if known.owned:
        symbols, words = "k (n-1)", f"{words}; k elements of the rank that owns most"

    def volume(rank: int) -> float:
        if known.owned:
            return known.total(known.owned, rank) * known.element * (n - 1) / n
        count = _gathers_of_step(known, rank) if (zero, kind) == (3, Kind.ALL_GATHER) else times
        psi = known.params[rank] if both else known.replica_elements(rank, of_experts=of_experts)
        # Gradients of experts with copies are whole until the end of the step, and are reduced once.
        late = known.copied[rank] if of_experts and known.copied and kind == Kind.REDUCE_SCATTER else 0.0
        return (count * (psi - late) + late) * known.element * (n - 1) / n

    return Formula(symbols, words, volume)


def _gathers_of_step(known: FormulaInputs, rank: int) -> float:
    """Return how often ZeRO-3 gathers each parameter in a step."""
    return (2 + known.ends_again + known.value_at(known.split, rank)) * known.microbatches


def _over_groups(known: FormulaInputs) -> Formula | None:
    """Return the formula along dp_replicate: the gradients of a rank's shard, summed over the groups."""
    n, r = known.mesh.dp_shard * known.mesh.cp, known.mesh.dp_replicate
    if not known.params:
        return None

    def shard(rank: int) -> float:
        experts = known.replica_elements(rank, of_experts=True) / known.mesh.edp
        return known.replica_elements(rank, of_experts=False) / n + experts

    return Formula(
        "2 psi/n (r-1)/r",
        "gradients of each shard, summed over the groups",
        lambda rank: 2 * shard(rank) * known.element * (r - 1) / r,
    )


def _exchanges(known: FormulaInputs) -> Formula | None:
    """Return the formula of all-to-alls along ep, and of Ulysses' too if the same ranks share sequences."""
    experts = _experts(known)
    if known.plan.get("cp_method") != "ulysses" or known.mesh.cp != known.mesh.ep:
        return experts
    attention = _context(known, Kind.ALL_TO_ALL)
    if experts is None or attention is None:
        return None
    both = experts.of, attention.of
    return Formula(
        f"{experts.symbols}; {attention.symbols}",
        f"{experts.words}; {attention.words}",
        lambda rank: sum(of(rank) for of in both),
    )


def _experts(known: FormulaInputs) -> Formula | None:
    """Return the formula along ep: rows to the ranks of their experts and back, if routing is uniform."""
    n, times = known.mesh.ep, 4.0 + 2.0 * known.recomputations
    if not _by_stage(known, known.rows):
        return None
    own_tokens = known.plan.get("sequence_parallel") and not any(known.expert_regions)
    divided = known.mesh.cp * (known.mesh.tp if own_tokens else 1)
    copied = any(known.copies)

    def volume(rank: int) -> float:
        counts = known.total(known.counts, rank) * (1 + known.recomputations)
        rows = (times * known.total(known.rows, rank) / divided + counts) * known.microbatches
        return rows * (n - 1) / n + (known.copies[rank] if copied else 0.0)  # a copy is never its owner's

    words = (
        "tokens to their experts and back: forward, and the gradients, as if experts were equally busy; "
        "a rank returns the rows that it received, so its ratio says how busy its experts are"
    )
    symbols = f"{times:g} T k h (ep-1)/ep a layer a micro-batch"
    if copied:
        symbols, words = f"{symbols}; 2 w a copy", f"{words}; weights of copies, and their gradients, w each"
    return Formula(symbols, words, volume)


def _context(known: FormulaInputs, kind: Kind) -> Formula | None:
    """Return the formula along cp: for a ring's messages, or for Ulysses' all-to-alls.

    A head of keys that several ranks need counts once for each of them.
    """
    c = known.mesh.cp
    tensors, times = known.keys_values, 2.0 + known.recomputations
    if kind == Kind.ALL_TO_ALL:
        tensors = [sum(pair) for pair in zip(tensors, known.queries_outputs, strict=False)]
        symbols, per_rank = f"{times:g} |Q, K, V, O| / c {_rest('c')}", times / c * (c - 1) / c
        words = "heads in place of tokens and back: forward, and the gradients"
    else:
        per_rank = times + max(4, known.element) / (known.element or 4)  # gradients travel in fp32 at least
        symbols = f"{per_rank:g} |K, V| {_rest('c')}"
        per_rank *= (c - 1) / c
        words = "keys and values round the ring: forward, backward, and their gradients"
    if not _by_stage(known, tensors):
        return None
    return Formula(
        f"{symbols} an attention a micro-batch",
        words,
        lambda rank: known.total(tensors, rank) / known.mesh.tp * known.microbatches * per_rank,
    )


def _rest(n: str) -> str:
    """Write the part of a tensor that leaves a rank."""
    return f"({n}-1)/{n}"


def _by_stage(known: FormulaInputs, values: Sequence[float]) -> bool:
    return len(values) == len(known.holders)
