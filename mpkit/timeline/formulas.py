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
          the numbers of rows by expert; experts' gradients are summed over the edp ranks that hold the same ones
    cp    keys and values once round the ring in the forward, again in the backward, and their gradients; under Ulysses
          4 all-to-alls of b s h / c elements per attention, forward and backward: 8 b s h / c (c-1)/c

No formula counts what routing by the whole batch, clipping, or an optimizer that divides by owner sends.

Sources: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2; Rajbhandari et al. 2020, section 7;
Narayanan et al. 2021, section 3.2; Liu et al. 2023, section 3; Liu et al., arXiv 2504.14960, section 3.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from mpkit.plan.mesh import Mesh, join_axes, long_axes, mesh_of
from mpkit.plan.plan import Plan
from mpkit.trace import Kind

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Formula(NamedTuple):
    """A volume according to theory."""

    symbols: str  # the formula as the papers write it, in elements
    words: str  # what is sent
    of: Callable[[int], float]  # from a rank to the bytes that it sends on the wire in a step


class FormulaInputs:
    """The inputs of the formulas: the mesh, the plan's fields, and what the run has noted in `meta["mesh"]`.

    `inputs[name]` is a list by stage, or () if it is not known; bytes are those of one micro-batch:

        layers_tp, experts_tp     pairs of f and g, 2 per transformer layer; layers whose experts are divided along tp
        embeddings_tp, heads_tp   embeddings and heads that are divided by vocabulary
        choices, rows_bytes       tokens' choices of experts, T k a layer; bytes of the rows that go to experts
        counts_bytes              bytes of the numbers of rows by expert
        kv_bytes, qo_bytes        keys and values of all attentions, whole sequences; queries and outputs
        partial_bytes             gradients that are summed over the ranks of a sequence, once per step
        by_owner                  whether owners divide the update, whose shares are not even
        local_params, expert_params   by rank: elements of the parameters, of the experts, of which it has a replica
        tied_bytes, tied_params   by place along pp: what tied weights send per step, and their elements there
        split                     by place along pp: the share of backwards that are split
        loss_bytes                bytes that the loss all-reduces, and bytes that it all-gathers

    Attributes:
        mesh, plan: of the run.
        holders: by stage, its place along pp.
        params: `local_params`, or for replicas of the whole model its number of parameters.
        element: bytes per element.
        stream: bytes of b s h, the activations between layers of one micro-batch of one replica, on average.
        blocks: how many of the model's repeated blocks are recomputed, and how many there are.
    """

    def __init__(self, meta: Mapping[str, Any], mesh: Mesh) -> None:
        self._told = dict(meta.get("mesh") or {})
        self.mesh, self.plan = mesh, json.loads(meta["plan"])
        names = ("pp", "schedule", "microbatches", "virtual_stages")
        pipeline = {name: self.plan[name] for name in names if name in self.plan}
        self.holders = list(Plan.from_json(pipeline).build().stage_to_rank) if mesh.pp > 1 else [0]
        self.params: Sequence[int] = self._told.get("local_params") or ()
        self.element = int(self._told.get("element_bytes") or 0)
        if "local_params" not in self._told and mesh.pp == mesh.tp == 1 and "parameters" in meta:
            self.params = [int(meta["parameters"])] * mesh.size
            self.element = _BYTES.get(str(meta.get("dtype")), 0)
        self.stream = float(self._told.get("stream_bytes") or 0)
        self.blocks = tuple(meta.get("blocks") or (0, 0))
        self.microbatches = int(self.plan.get("microbatches", 1))

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], ranks: int) -> FormulaInputs | None:
        """Read the inputs from a trace's meta; None without a plan."""
        mesh = mesh_of(meta, ranks)
        return None if mesh is None else cls(meta, mesh)

    def __getitem__(self, name: str) -> Sequence[float]:
        return self._told.get(name) or ()

    @property
    def divided(self) -> bool:
        """Whether tp divides the sequence as well."""
        return bool(self.plan.get("sequence_parallel"))

    @property
    def recomputations(self) -> float:
        """How often a block's forward is recomputed before its backward, on average."""
        recomputed, of = self.blocks
        return recomputed / of if of else self.ends_again

    @property
    def ends_again(self) -> int:
        """How often the forward of layers outside the blocks is recomputed: never, unless whole stages are."""
        return int(self.plan.get("recompute") == "full" and not self.blocks[1])

    @property
    def shares(self) -> int:
        """The number of ranks among which updated parameters are divided."""
        return self.mesh.dp_shard * self.mesh.cp if self.plan.get("zero") else 1

    def replica_elements(self, rank: int, *, of_experts: bool) -> float:
        """Return the number of elements in the experts of which a rank holds a replica, or in all other parameters."""
        experts = self["expert_params"][rank] if self["expert_params"] else 0
        return experts if of_experts else self.params[rank] - experts

    def at_place(self, name: str, rank: int) -> float:
        """Return the value for a rank's place along pp; 0 if it is not known."""
        return self[name][self.mesh.place(rank).pp] if self[name] else 0.0

    def total(self, by_stage: Sequence[float], rank: int) -> float:
        """Return the sum over a rank's stages; 0 if it is not known."""
        place = self.mesh.place(rank).pp
        mine = [stage for stage, holder in enumerate(self.holders) if holder == place]
        return sum(by_stage[stage] for stage in mine) if by_stage else 0.0

    def of_all_stages(self, name: str) -> bool:
        """Return whether an input is known for each stage."""
        return len(self[name]) == len(self.holders)


def formula_of(known: FormulaInputs | None, axis: str, kind: Kind) -> Formula | None:
    """Return the formula for what a rank should send by this kind along this axis; None where none is known."""
    if known is None:
        return None
    mesh = known.mesh
    shard_group = join_axes(name for name in mesh.parts("dp_shard", "cp") if name in long_axes(mesh))
    if axis == "tp":
        return _tensor(known, kind)
    if axis == "pp" and kind == Kind.SEND:
        return _pipeline(known)
    if axis in ("cp", "edp") and kind in (Kind.SEND, Kind.ALL_TO_ALL):
        return _context(known, kind)
    if axis == "dp_replicate" and kind == Kind.ALL_REDUCE:
        return _over_groups(known)
    if axis == "ep" and kind == Kind.ALL_TO_ALL:  # Ulysses' too, if the same ranks share sequences
        if known.plan.get("cp_method") != "ulysses" or mesh.cp != mesh.ep:
            return _experts(known)
        both = _experts(known), _context(known, kind)
        return None if None in both else _sum(*both)
    return _replicas(known, kind, of_experts=axis == "edp") if axis in (shard_group, "edp") else None


def _sum(*parts: Formula | None) -> Formula | None:
    """Return the sum of the formulas that are known; None if none is."""
    there = [part for part in parts if part is not None]
    symbols = "; ".join(dict.fromkeys(part.symbols for part in there))
    words = "; ".join(dict.fromkeys(part.words for part in there))
    return Formula(symbols, words, lambda rank: sum(part.of(rank) for part in there)) if there else None


# ---- tp


def _tensor(known: FormulaInputs, kind: Kind) -> Formula | None:
    """Return the formula along tp: what the tensor-parallel regions send, and everything else along that axis.

    It counts passes: how often all of b s h travels round the ring per micro-batch, as in an all-gather; an all-reduce
    is two. `region` is those of a region, `others` by stage those of everything else.
    """
    again, ends, last = known.recomputations, known.ends_again, len(known.holders) - 1
    both = zip(known["embeddings_tp"], known["heads_tp"], strict=False)
    vocabulary = [2.0 * (embeddings * (1 + ends) + heads) for embeddings, heads in both]
    reduced, gathered = known["loss_bytes"] or (0.0, 0.0)
    loss = {Kind.ALL_REDUCE: 2.0 * reduced, Kind.ALL_GATHER: gathered}.get(kind, 0.0) * (1 + ends)
    # A backward that is not split gathers its input again for the weights.
    anew = int(not any(known["split"]))
    others: Sequence[float] = ()
    step: Sequence[float] = ()
    region, symbols = 0.0, ""
    if known.divided and kind == Kind.ALL_REDUCE:
        others, symbols = vocabulary, "2 an embedding or head"
        words = "outside of the divided sequence, and gradients of what is used on a part of it"
        step = [2.0 * size for size in known["partial_bytes"]]
    elif known.divided and kind == Kind.ALL_GATHER:
        region, symbols = 2 + anew + again, "1 at each end"
        others = [float((stage == 0) + (stage == last) * (1 + ends)) for stage in range(last + 1)]
        words = "all-gathers: into a region, back out of it" + ", again for its weights" * anew
    elif known.divided and kind == Kind.REDUCE_SCATTER:
        region = 2 + again
        words = "reduce-scatters: out of a region, and of gradients back out of its beginning"
    elif kind == Kind.ALL_REDUCE:
        region, others, symbols = 2 * (2 + again), vocabulary, "2 an embedding or head" * any(vocabulary)
        words = "all-reduces: of partial sums forward, of gradients backward"
    elif kind == Kind.ALL_GATHER:
        words = "logits, for a loss that asks for the whole"
    else:
        return None
    something = region or any((*others, loss, *step))
    if not something or not known.stream or not known.of_all_stages("layers_tp"):
        return None
    once, stream = (known.mesh.tp - 1) / known.mesh.tp, known.stream / known.mesh.cp
    # Experts that are divided: where the sequence is, tokens are gathered with the numbers of their experts.
    weights, numbers = {
        (False, Kind.ALL_REDUCE): (2.0, 0.0),
        (True, Kind.ALL_GATHER): (1 + again, 8 * (1 + again)),
        (True, Kind.REDUCE_SCATTER): (1.0, 0.0),
    }.get((known.divided, kind), (0.0, 0.0))
    times = region - anew * (known.divided and kind == Kind.ALL_GATHER)

    def experts(rank: int) -> float:
        layers, choices = known.total(known["experts_tp"], rank), known.total(known["choices"], rank)
        return times * layers * stream + choices * (weights * known.element + numbers) / known.mesh.cp

    def volume(rank: int) -> float:
        layers = region * known.total(known["layers_tp"], rank) + known.total(others, rank)
        of_loss = loss * (known.holders[last] == known.mesh.place(rank).pp)
        every = known.microbatches * (layers * stream + experts(rank) + of_loss)
        return (every + known.total(step, rank) / known.shares) * once

    more = ", T k more of experts" * any(map(experts, range(known.mesh.size)))
    return Formula(_tensor_symbols(region, symbols, loss) + more, words, volume)


def _tensor_symbols(region: float, more: str, loss: float) -> str:
    unit = "b s h (t-1)/t"
    told = [f"{2 * region:g} {unit} a layer"] if region else []
    if more:
        number, _, what = more.partition(" ")
        told.append(f"{number} {what}" if told else f"{number} {unit} {what}")
    if not told and not loss:
        return "2 psi (t-1)/t of them, a step"
    return f"{', '.join(told) or 'b s V (t-1)/t'}, a micro-batch"


# ---- pp and cp


def _pipeline(known: FormulaInputs) -> Formula | None:
    """Return the formula along pp: every boundary between stages that different ranks hold adds to it."""
    if not known.stream:
        return None
    divided = known.mesh.tp if known.divided else 1
    message = known.stream / known.mesh.cp / divided
    ends = [pair for pair in pairwise(known.holders) if pair[0] != pair[1]]
    messages = Formula(
        f"b s h{' / t' if divided > 1 else ''} a boundary a micro-batch, each way",
        "activations to the next stage, their gradients to the one before",
        lambda rank: sum(known.mesh.place(rank).pp in pair for pair in ends) * known.microbatches * message,
    )
    words = "tied weights' gradients, and what they become"
    tied = Formula("psi a tied weight", words, lambda rank: known.at_place("tied_bytes", rank) / known.shares)
    return _sum(messages, tied if any(known["tied_bytes"]) else None)


def _context(known: FormulaInputs, kind: Kind) -> Formula | None:
    """Return the formula along cp: for a ring's messages, or for Ulysses' all-to-alls.

    A head of keys that several ranks need counts once for each of them.
    """
    c, tensors, times = known.mesh.cp, known["kv_bytes"], 2.0 + known.recomputations
    if not known.of_all_stages("kv_bytes"):
        return None
    if kind == Kind.ALL_TO_ALL:
        tensors = [sum(pair) for pair in zip(tensors, known["qo_bytes"], strict=False)]
        symbols, per_rank = f"{times:g} |Q, K, V, O| / c (c-1)/c", times / c
        words = "heads in place of tokens and back: forward, and the gradients"
    else:
        per_rank = times + max(4, known.element) / (known.element or 4)  # gradients travel in fp32 at least
        symbols = f"{per_rank:g} |K, V| (c-1)/c"
        words = "keys and values round the ring: forward, backward, and their gradients"
    each = known.microbatches * per_rank * (c - 1) / c / known.mesh.tp
    symbols += " an attention a micro-batch"
    return Formula(symbols, words, lambda rank: known.total(tensors, rank) * each)


# ---- dp and ep


def _replicas(known: FormulaInputs, kind: Kind, *, of_experts: bool = False) -> Formula | None:
    """Return the formula over the ranks among which ZeRO shards, for all parameters but experts or for these."""
    mesh, m = known.mesh, known.microbatches
    n = mesh.edp if of_experts else mesh.dp_shard * mesh.cp
    # Where tp is folded, the ranks that hold the same experts can be those that hold the same of all else.
    both = of_experts and mesh.groups("edp") == mesh.groups("dp_shard", "cp")
    zero = int(known.plan.get("zero", 0))
    every = f"{m} x " if m > 1 else ""  # ZeRO-2 and -3 have nowhere to accumulate full gradients
    gathers = 2 + known.ends_again  # recomputing a block needs no gather of its own
    halves = ", once more where it is split" if any(known["split"]) else ""
    updated = (1, "psi (n-1)/n", "updated parameters, to all")
    scattered = (m, f"{every}psi (n-1)/n", "gradients of each micro-batch, to who keeps them")
    before = f"parameters before each forward and each backward{halves}"
    by_kind = {
        (0, Kind.ALL_REDUCE): (2, "2 psi (n-1)/n", "gradients, summed over the replicas"),
        (1, Kind.REDUCE_SCATTER): (1, "psi (n-1)/n", "gradients, to who updates them"),
        (1, Kind.ALL_GATHER): updated,
        (2, Kind.REDUCE_SCATTER): scattered,
        (2, Kind.ALL_GATHER): updated,
        (3, Kind.REDUCE_SCATTER): scattered,
        (3, Kind.ALL_GATHER): (gathers * m, f"{every}{gathers} psi (n-1)/n", before),
    }
    unlike = known["by_owner"] or known.plan.get("data_parallel", "ddp") != "ddp"
    if (zero, kind) not in by_kind or not known.params or unlike:
        return None
    times, symbols, words = by_kind[zero, kind]

    def volume(rank: int) -> float:
        split = known.at_place("split", rank) * m if (zero, kind) == (3, Kind.ALL_GATHER) else 0.0
        psi = known.params[rank] if both else known.replica_elements(rank, of_experts=of_experts)
        # A tied weight's gradients are complete when all of its stages are done: once a step.
        tied = 0.0 if of_experts and not both else known.at_place("tied_params", rank)
        less = (times - 1) * tied if zero > 1 and kind == Kind.REDUCE_SCATTER else 0.0
        return ((times + split) * psi - less) * known.element * (n - 1) / n

    return Formula(symbols, words, volume)


def _over_groups(known: FormulaInputs) -> Formula | None:
    """Return the formula along dp_replicate: the gradients of a rank's shard, summed over the groups."""
    n, r = known.mesh.dp_shard * known.mesh.cp, known.mesh.dp_replicate
    if not known.params:
        return None

    def volume(rank: int) -> float:
        experts = known.replica_elements(rank, of_experts=True) / known.mesh.edp
        shard = known.replica_elements(rank, of_experts=False) / n + experts
        return 2 * shard * known.element * (r - 1) / r

    return Formula("2 psi/n (r-1)/r", "gradients of each shard, summed over the groups", volume)


def _experts(known: FormulaInputs) -> Formula | None:
    """Return the formula along ep: rows to the ranks of their experts and back, if routing is uniform."""
    n, times = known.mesh.ep, 4.0 + 2.0 * known.recomputations
    if not known.of_all_stages("rows_bytes"):
        return None
    divided = known.mesh.cp * (known.mesh.tp if known.divided and not any(known["experts_tp"]) else 1)

    def volume(rank: int) -> float:
        counts = known.total(known["counts_bytes"], rank) * (1 + known.recomputations)
        rows = times * known.total(known["rows_bytes"], rank) / divided + counts
        return rows * known.microbatches * (n - 1) / n

    words = (
        "tokens to their experts and back: forward, and the gradients, as if experts were equally busy; "
        "a rank returns the rows that it received, so its ratio says how busy its experts are"
    )
    return Formula(f"{times:g} T k h (ep-1)/ep a layer a micro-batch", words, volume)
