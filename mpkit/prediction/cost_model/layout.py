"""Layout: the degrees of a plan as numbers, with what only some frameworks have (expert parallelism).

Shares: how many parameters a rank of a layout computes with, and how many of them it updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil, gcd
from typing import Any

from mpkit.plan.kinds import CONTIGUOUS, ZIGZAG, whole
from mpkit.plan.plan import Plan
from mpkit.plan.schedule import Schedule
from mpkit.plan.schedule.catalogue import ONE_F_ONE_B
from mpkit.plan.schedule.summary import stage_ranks
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.stack import Stack

__all__ = ["Layout", "ParameterShares", "layout_of", "model_under", "plan_of"]


@dataclass(frozen=True)
class Layout:
    """How the work of a step is divided.

    Attributes:
        pp, dp, cp, tp: the degrees of the mesh; tp is innermost, pp outermost.
        ep: the ranks, out of dp x cp, among which the experts of a layer are divided.
        etp: the ranks along tp that share each expert: 1 if each has whole ones; 0: all of them.
        alike: whether the ranks along tp hold the same whole experts, instead of being among those that ep counts.
        zero: the stage of ZeRO.
        microbatch: samples per micro-batch and replica.
        microbatches: micro-batches per step and replica, m.
        virtual_stages: stages per rank, v.
        schedule: the pipeline's schedule, or its name.
        recompute: "none", "selective" (attention), "products" (everything but half of the products and the attention),
            "full", or "every=k".
        sequence_parallel: whether what tensor parallelism leaves whole is divided by sequence.
        offload: "none", "optimizer" or "params".
        cut: the layers of each stage; (): equal numbers, or by weight.
        head: where stages are cut by weight, as nanotron cuts them: as how many layers the head counts; 0: equal
            numbers.
        trainable: the share of the parameters that is trained; the others are frozen (LoRA: Hu et al. 2021).
        sharded: the ranks among which ZeRO shards; 0: all that hold the same weights. Fewer: HSDP.
        cp_method, cp_order, prefetch: as in a Plan.
        load: the rows of the busiest of the ranks that divide experts, divided by the mean.

    >>> Layout(pp=2, dp=4, tp=8, microbatches=16).global_batch
    64
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 0
    alike: bool = False
    zero: int = 0
    microbatch: int = 1
    microbatches: int = 1
    virtual_stages: int = 1
    schedule: str | Schedule = ONE_F_ONE_B
    recompute: str = "none"
    sequence_parallel: bool = False
    offload: str = "none"
    cut: Sequence[int] = ()
    head: float = 0.0
    trainable: float = 1.0
    sharded: int = 0
    cp_method: str = "ring"
    cp_order: str = ZIGZAG
    prefetch: int = 1
    load: float = 1.0

    @cached_property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def ulysses(self) -> int:
        """The ranks, out of cp, that divide the heads for attention; the others of a sequence are in a ring."""
        return self.cp if self.cp_method == "ulysses" else 1

    @property
    def ring(self) -> int:
        """The ranks, out of cp, that pass keys and values around."""
        return self.cp // self.ulysses

    @cached_property
    def replicas(self) -> int:
        """The number of ranks that would hold the same weights without ZeRO: those along dp and cp."""
        return self.dp * self.cp

    @property
    def expert_tp(self) -> int:
        """The number of ranks that share each expert."""
        return self.etp or self.tp

    @property
    def expert_shards(self) -> int:
        """The number of ranks that hold the same experts, and among which ZeRO shards these."""
        folded = 1 if self.alike else self.tp // self.expert_tp
        return max(1, self.shards * folded // self.ep)

    @property
    def own_experts(self) -> bool:
        """Whether fewer ranks hold an expert than hold other weights: each replica has experts of its own."""
        return self.ep > 1

    @property
    def summed_experts(self) -> bool:
        """Whether ranks along tp that hold the same experts sum their gradients, each of its part of the sequence."""
        return self.alike and self.sequence_parallel and self.tp > 1

    @property
    def expert_parts(self) -> int:
        """The number of parts into which the work of a token's experts is divided along tp.

        Ranks that share no experts compute those of their own part of the sequence, or all the same.
        """
        return self.tp if self.sequence_parallel else self.expert_tp

    @property
    def busiest(self) -> float:
        """The rows of the busiest rank's experts, divided by the mean of the ranks that divide them."""
        return min(self.load, float(self.ep))

    @cached_property
    def last(self) -> int:
        """The rank, along pp, that holds the last stage: the head and the loss are there."""
        return stage_ranks(self.schedule, self.pp)[-1]

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        """The rank, along pp, of each stage.

        >>> Layout(pp=2, virtual_stages=2, schedule="zbv").stage_to_rank
        (0, 1, 1, 0)
        """
        return stage_ranks(self.schedule, self.pp, self.virtual_stages)

    @property
    def shards(self) -> int:
        """The number of ranks among which ZeRO shards."""
        return self.sharded or self.replicas

    @property
    def groups(self) -> int:
        """The number of ranks that hold the same shard: 1 unless sharding is hybrid."""
        return self.replicas // self.shards

    @property
    def global_batch(self) -> int:
        """Samples per step."""
        return self.dp * self.microbatch * self.microbatches

    def vary(self, **changes: Any) -> Layout:
        """Return the layout with other fields, for searches: several times as fast as `replace`.

        >>> Layout(dp=4, zero=3).vary(offload="params", cp_method="ulysses").replicas
        4

        What follows from the degrees is computed here, so that all variants of a layout share it.

        Args:
            changes: fields by name, other than the degrees and the schedule, from which others are derived.
        """
        _ = self.ranks, self.replicas, self.last
        other = object.__new__(Layout)
        other.__dict__.update(self.__dict__, **changes)
        return other

    def per_node(self, axis: str, devices: int) -> int:
        """Return how many ranks of a group along an axis share a node, in the group that is divided most.

        >>> Layout(tp=8).per_node("tp", 8), Layout(tp=6).per_node("tp", 8)  # ranks 6 and 7, and 8 to 11
        (8, 2)

        Args:
            axis: "tp", "cp", "ulysses" and "ring" (the parts of cp), "replicas" (dp and cp), "shards" (those among
                which ZeRO shards), "groups" (those that hold the same shard) or
                "ep": beside each other, and tp apart where the ranks along tp share an expert or hold the same ones;
                "edp": those among which ZeRO shards an expert.
            devices: devices per node.
        """
        inner, size = {
            "tp": (1, self.tp),
            "cp": (self.tp, self.cp),
            "ulysses": (self.tp, self.ulysses),
            "ring": (self.tp * self.ulysses, self.ring),
            "ep": (self.tp if self.alike else self.expert_tp, self.ep),
            "edp": ((self.tp if self.alike else self.expert_tp) * self.ep, self.expert_shards),
            "replicas": (self.tp, self.replicas),
            "shards": (self.tp, self.shards),
            "groups": (self.tp * self.shards, self.groups),
        }[axis]
        places = devices // inner
        return gcd(size, places) if places and size > 1 else 1

    def stage_layers(self, layers: int) -> list[int]:
        """Return the number of layers that each rank of a pipeline holds.

        >>> Layout(pp=4).stage_layers(30)
        [8, 8, 7, 7]
        >>> Layout(pp=2, head=4.0).stage_layers(16)  # the second stage has the head too
        [11, 5]
        """
        if self.cut:
            return list(self.cut)
        if self.head and self.pp > 1:
            return list(_by_weight(layers, self.pp, self.head))
        each, more = divmod(layers, self.pp)
        return [each + (stage < more) for stage in range(self.pp)]


@cache
def _by_weight(layers: int, pp: int, head: float) -> tuple[int, ...]:
    """Return the layers of each stage as nanotron cuts them: a stage ends with the block that exceeds its share."""
    held, stage = [0] * pp, 0
    for layer in range(1, layers + 1):
        held[stage] += 1
        if layer > (layers + head) * (stage + 1) / pp:
            stage += 1
    return tuple(held)


def layout_of(
    plan: Plan, global_batch: int, trainable: float = 1.0, load: float = 1.0
) -> Layout:  # fmt: skip
    """Return a plan's layout for a number of samples per step.

    Raises:
        ValueError: the samples cannot be divided among replicas and micro-batches.

    >>> layout_of(Plan(pp=2, dp=2, schedule="1f1b", microbatches=4), 32).microbatch
    4
    """
    parts = plan.dp * plan.microbatches
    if (whole(global_batch) or 0) < 1:
        raise ValueError(f"global_batch={global_batch!r}: samples per step, a whole number, 1 or more")
    if global_batch % parts:
        near = max(1, round(global_batch / parts)) * parts
        raise ValueError(
            f"global_batch={global_batch} does not divide into dp={plan.dp} replicas x "
            f"microbatches={plan.microbatches} = {parts} micro-batches: global_batch={near} does"
        )
    return Layout(
        pp=plan.pp, dp=plan.dp, cp=plan.cp, tp=plan.tp, zero=plan.zero, microbatch=global_batch // parts,
        microbatches=plan.microbatches, virtual_stages=plan.virtual_stages, schedule=plan.schedule,
        recompute=plan.recompute, sequence_parallel=plan.sequence_parallel, offload=plan.offload,
        trainable=trainable, sharded=plan.shards if plan.dp_shard else 0,
        cp_method=plan.cp_method, cp_order=plan.cp_order, prefetch=plan.prefetch, ep=plan.ep,
        etp=1 if plan.ep > 1 and plan.etp in (None, 1) else 0,
        alike=plan.ep > 1 and plan.tp > 1 and plan.etp is None,
        load=load,
    )  # fmt: skip


def plan_of(layout: Layout) -> Plan:
    """Return the plan of a layout, in 16 bits."""
    return Plan(
        pp=layout.pp, dp=layout.dp, tp=layout.tp, cp=layout.cp, zero=layout.zero, schedule=layout.schedule,
        microbatches=layout.microbatches, virtual_stages=layout.virtual_stages, recompute=layout.recompute,
        sequence_parallel=layout.sequence_parallel, offload=layout.offload, precision="bf16",
        dp_shard=layout.sharded // layout.cp or None, cp_method=layout.cp_method, ep=layout.ep,
        etp=layout.expert_tp if layout.ep > 1 and layout.tp > 1 and not layout.alike else None,
        cp_order=layout.cp_order if layout.ring > 1 else CONTIGUOUS, prefetch=layout.prefetch,
    )  # fmt: skip


# ---- parameters of the ranks


def model_under(stack: Stack, model: Architecture) -> Architecture:
    """Return the sizes of a model as a stack runs it: some divide experts along tp that others leave whole."""
    return replace(model, whole_experts=False) if model.whole_experts and stack.divides_experts else model


class ParameterShares:
    """The parameters of the ranks of a layout.

    Attributes:
        stack: the software stack.
        stages: parameters of each stage as one of its ranks computes with them, divided by tp, and by ep.
        experts: of these, those of experts, which fewer replicas hold.
        parameters: those of the rank that holds most.
        own: of these, those of experts.
        updated: those that this rank updates: under ZeRO a part.
        layer: those of the largest layer, divided by tp, and by ep.
        layer_experts: of these, those of experts.
        edge: those outside the layers, of the first or the last stage.

    >>> gpt2 = Architecture(12, 768, 12, vocabulary=50257, positions=1024, tied=True, bias=True)
    >>> ParameterShares(gpt2, Layout(dp=4, zero=1), Stack("pytorch")).updated
    31109952.0
    """

    def __init__(self, model: Architecture, layout: Layout, stack: Stack) -> None:
        self.stack = stack
        t, divided = layout.tp, layout.expert_tp * layout.ep
        kinds: list[
            tuple[int, int, float, float]
        ] = []  # first, end; what a rank holds of it, and of its experts
        for first, count in model.kinds():
            experts, parted = model.expert_parameters(first), model.divided_parameters(first)
            whole = model.layer_parameters(first) - experts - parted
            kinds.append((first, first + count, whole + parted / t, experts / divided))
        self.layer, self.layer_experts = max(((rest + own, own) for _, _, rest, own in kinds))
        held = layout.stage_layers(model.layers)
        self._layers = max(held)
        begin = 0
        self.stages: list[float] = []
        self.experts: list[float] = []
        for count in held:
            end = begin + count
            rest_here = own_here = 0.0
            for first, last, rest, own in kinds:
                within = max(0, min(end, last) - max(begin, first))
                rest_here += within * rest
                own_here += within * own
            self.stages.append(rest_here + own_here)
            self.experts.append(own_here)
            begin = end
        edges = [
            (all_of_it - whole) / t + whole
            for all_of_it, whole in zip(
                (model.embedding_parameters, model.head_parameters), model.whole_at_edges, strict=True
            )
        ]
        self.edge = max(edges)
        self.stages[0] += edges[0]
        self.stages[layout.last] += edges[1]
        if model.tied and layout.last:  # the last stage holds a copy of the embedding
            self.stages[layout.last] += model.vocabulary * model.hidden / t
        most = max(range(len(held)), key=self.stages.__getitem__)
        self.parameters, self.own = self.stages[most], self.experts[most]
        self.updated = self.updated_on(most, layout)

    def calls(self, parameters: float, element: float, layout: Layout) -> int:
        """Return how many collectives send so many gradients or weights, of so many bytes each.

        PyTorch's FSDP makes one per layer, DeepSpeed one per `partition` of elements, Megatron and DDP one per bucket.

        >>> from mpkit.prediction.cost_model.stack import stack_of
        >>> gpt2 = Architecture(12, 768, 12, vocabulary=50257, positions=1024, tied=True, bias=True)
        >>> layout = Layout(dp=8, zero=1)
        >>> [ParameterShares(gpt2, layout, stack_of(name)).calls(125e6, 4, layout) for name in ("pytorch", "megatron")]
        [20, 4]
        """
        if self.stack.bucket_by_replicas:
            bucket = max(40e6, 1e6 * layout.replicas) if self.stack.overlap else parameters
            return max(1, ceil(parameters / bucket)) if parameters else 0
        if self.stack.partition:
            return max(1, ceil(parameters / self.stack.partition))
        return self._layers if layout.zero == 2 else max(1, ceil(parameters * element / self.stack.bucket))

    def updated_on(self, stage: int, layout: Layout) -> float:
        """Return the parameters that a rank of a stage updates: under ZeRO, of experts too, its part."""
        held = self.sharded_on(stage, layout) if layout.zero else self.stages[stage]
        return held * layout.trainable

    def sharded_on(self, stage: int, layout: Layout) -> float:
        """Return the parameters in the shard of a rank of a stage; fewer ranks share experts."""
        whole, own = self.stages[stage], self.experts[stage]
        return (whole - own) / layout.shards + own / layout.expert_shards
