"""What the formulas of communication need, as far as a trace's meta tells it (`mpkit.formulas`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpkit.mesh import Mesh
from mpkit.whereabouts import holders_of, mesh_of

__all__ = ["Known"]


_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Known:
    """What formulas need, as far as it is known.

    Attributes:
        mesh: of the run.
        plan: its plan's fields.
        holders: by stage, the place along pp that holds it.
        params: by rank, the elements of the parameters that it holds a replica of.
        element: bytes of one.
        stream: bytes of b s h, one micro-batch's activations between layers, of one replica, on average.
        regions: by stage, how many pairs of f and g it has: 2 a transformer layer.
        embeddings, heads: by stage, how many of them are divided by vocabulary.
        keys_values: by stage, bytes of one micro-batch's keys and values in all its attentions, the whole sequence.
        loss: bytes that the loss of a micro-batch all-reduces, and that it gathers.
        partial: by stage, bytes of gradients that are summed over the ranks of a sequence once a step.
        tied: by place along pp, bytes of tied weights and their gradients that it sends once a step.
        split: by place along pp, the share of its backwards that are done in two halves.
        blocks: how many of the model's repeated blocks are recomputed, and of how many.
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
    loss: Sequence[float] = (0.0, 0.0)
    partial: Sequence[float] = ()
    tied: Sequence[float] = ()
    split: Sequence[float] = ()
    blocks: tuple[int, int] = (0, 0)

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
            keys_values=told.get("kv_bytes") or (), loss=told.get("loss_bytes") or (0.0, 0.0),
            partial=told.get("partial_bytes") or (), tied=told.get("tied_bytes") or (), split=told.get("split") or (),
            blocks=tuple(meta.get("blocks") or (0, 0)),
        )  # fmt: skip

    @property
    def microbatches(self) -> int:
        """How many a step: m."""
        return int(self.plan.get("microbatches", 1))

    @property
    def again(self) -> float:
        """Forwards of a block that are done again before its backward, on average."""
        recomputed, of = self.blocks
        return recomputed / of if of else self.ends_again

    @property
    def ends_again(self) -> int:
        """Forwards of what lies beside the blocks that are done again: none, unless whole stages are."""
        return int(self.plan.get("recompute") == "full" and not self.blocks[1])

    @property
    def gathers_again(self) -> int:
        """What is divided by sequence, for the gradients of weights; where a backward is split it is kept whole."""
        return int(not any(self.split))

    def at(self, by_place: Sequence[float], rank: int) -> float:
        """What a rank's place along pp has; 0 of what is not known."""
        return by_place[self.mesh.place(rank).pp] if by_place else 0.0

    @property
    def shares(self) -> int:
        """Ranks among which what is updated is divided."""
        return self.mesh.dp * self.mesh.cp if self.plan.get("zero") else 1

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds."""
        place = self.mesh.place(rank).pp
        return [stage for stage, holder in enumerate(self.holders) if holder == place]

    def total(self, by_stage: Sequence[float], rank: int) -> float:
        """What a rank's stages have together; 0 of what is not known."""
        return sum(by_stage[stage] for stage in self.stages_of(rank)) if by_stage else 0.0
