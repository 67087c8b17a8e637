"""The inputs of the communication formulas (`mpkit.timeline.formulas`), as far as a trace's meta has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpkit.plan.mesh import Mesh
from mpkit.plan.mesh_of_trace import holders_of, mesh_of

__all__ = ["FormulaInputs"]


_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class FormulaInputs:
    """The inputs of the communication formulas, as far as they are known.

    Attributes:
        mesh: the mesh of the run.
        plan: the fields of the run's plan.
        holders: by stage, its place along pp.
        params: by rank, the number of elements in the parameters of which it holds a replica.
        element: bytes per element.
        stream: bytes of b s h, the activations between layers of one micro-batch of one replica, on average.
        regions: by stage, its number of pairs of f and g: 2 per transformer layer.
        expert_regions: by stage, its number of layers whose experts are divided along tp.
        choices: by stage, the number of tokens' choices of experts in these layers, of one micro-batch, T k each.
        embeddings, heads: by stage, the number of embeddings and heads that are divided by vocabulary.
        keys_values: by stage, bytes of one micro-batch's keys and values in all its attentions, whole sequences.
        queries_outputs: the same of queries and outputs.
        loss: bytes per micro-batch that the loss all-reduces, and bytes that it all-gathers.
        partial: by stage, bytes of gradients that are summed over the ranks of a sequence once per step.
        tied: by place along pp, bytes of tied weights and their gradients that it sends once per step.
        split: by place along pp, the fraction of its backwards that are split in two.
        experts: by rank, the number of elements in the experts that it holds, under expert parallelism.
        rows: by stage, bytes of the rows of one micro-batch that go to experts, whole sequences.
        counts: by stage, bytes of the numbers of rows by expert.
        copies: by rank, bytes of copies of experts that it sends per step: weights that it owns, gradients of others'.
        copied: by rank, the elements of its experts in layers that have copies, whose gradients are complete late.
        owned: by stage, n k: of n ranks and of the k elements of the one that owns most, where ZeRO-1 divides by owner.
        routing: by stage, bytes of all-reduces per step, for routing that depends on the whole batch.
        norm_axes: the axes along which the squares of gradients are summed once per step, to clip them; ().
        blocks: how many of the model's repeated blocks are recomputed, and how many there are.
    """

    mesh: Mesh
    plan: Mapping[str, Any]
    holders: Sequence[int]
    params: Sequence[int] = ()
    element: int = 0
    stream: float = 0.0
    regions: Sequence[int] = ()
    expert_regions: Sequence[int] = ()
    choices: Sequence[float] = ()
    embeddings: Sequence[int] = ()
    heads: Sequence[int] = ()
    keys_values: Sequence[float] = field(default=())
    queries_outputs: Sequence[float] = ()
    loss: Sequence[float] = (0.0, 0.0)
    partial: Sequence[float] = ()
    tied: Sequence[float] = ()
    split: Sequence[float] = ()
    experts: Sequence[int] = ()
    rows: Sequence[float] = ()
    counts: Sequence[float] = ()
    copies: Sequence[float] = ()
    copied: Sequence[float] = ()
    owned: Sequence[float] = ()
    routing: Sequence[float] = ()
    norm_axes: Sequence[str] = ()
    blocks: tuple[int, int] = (0, 0)

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], ranks: int) -> FormulaInputs | None:
        """Read the inputs from a trace's meta, from its "plan" and "mesh"; None without a plan."""
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
            expert_regions=told.get("experts_tp") or (), choices=told.get("choices") or (),
            embeddings=told.get("embeddings_tp") or (), heads=told.get("heads_tp") or (),
            keys_values=told.get("kv_bytes") or (),
            queries_outputs=told.get("qo_bytes") or (), loss=told.get("loss_bytes") or (0.0, 0.0),
            partial=told.get("partial_bytes") or (), tied=told.get("tied_bytes") or (), split=told.get("split") or (),
            experts=told.get("expert_params") or (), rows=told.get("rows_bytes") or (),
            counts=told.get("counts_bytes") or (), copies=told.get("copies_bytes") or (),
            copied=told.get("copied_params") or (), owned=told.get("owned") or (),
            routing=told.get("routing_reduced") or (),
            norm_axes=meta.get("norm_axes") or (), blocks=tuple(meta.get("blocks") or (0, 0)),
        )  # fmt: skip

    def replica_elements(self, rank: int, *, of_experts: bool) -> int:
        """Return the number of elements in the experts of which a rank holds a replica, or in all other parameters."""
        experts = self.experts[rank] if self.experts else 0
        return experts if of_experts else self.params[rank] - experts

    @property
    def microbatches(self) -> int:
        """The number of micro-batches per step, m."""
        return int(self.plan.get("microbatches", 1))

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
    def gathers_again(self) -> int:
        """Number of additional all-gathers for weight gradients: 1, or 0 when a split backward keeps the gathered
        input.
        """
        return int(not any(self.split))

    def value_at(self, by_place: Sequence[float], rank: int) -> float:
        """Return the value for a rank's place along pp; 0 if it is not known."""
        return by_place[self.mesh.place(rank).pp] if by_place else 0.0

    @property
    def shares(self) -> int:
        """The number of ranks among which updated parameters are divided."""
        return self.mesh.dp_shard * self.mesh.cp if self.plan.get("zero") else 1

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank holds."""
        place = self.mesh.place(rank).pp
        return [stage for stage, holder in enumerate(self.holders) if holder == place]

    def total(self, by_stage: Sequence[float], rank: int) -> float:
        """Return the sum over a rank's stages; 0 if it is not known."""
        return sum(by_stage[stage] for stage in self.stages_of(rank)) if by_stage else 0.0
