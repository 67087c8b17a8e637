"""TensorPlan: which linear layers of a model are divided over the ranks of a tensor-parallel group, and how.

A *region* is what Megatron puts between f and g: layers that are divided by columns (their outputs), whatever lies
between, and a layer that is divided by rows (its inputs), whose partial results are summed. The model keeps its own
forward.

    x ──f── column ── GELU ── row ──g── y          an MLP: entry "mlp", column ("mlp.up",), row "mlp.down"
    x ──f── q, k, v ── attention ── out ──g── y    an attention: entry "attn", likewise, divided by heads

Names are those of `model.named_modules()`. A `*` stands for any part of a name between two dots; in `column` and `row`
it stands for the same part as in `entry`. So one region describes all layers of one kind.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019,
section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Region:
    """Layers between an f and a g.

    How a column layer's outputs are divided over t ranks:

        evenly              Region("mlp", ("mlp.up",), "mlp.down")
        by heads            heads="num_heads": whole heads, of which the entry's attribute has the number
        grouped queries     heads="config.num_key_value_heads": k and v by their own heads, q by the groups that
                            belong to them; every layer's width is a multiple of the number of heads
        q, k, v in one      sections=(1, 1, 1): one after another in that ratio of widths, each divided by itself;
                            with 4 query heads per key head, sections=(4, 1, 1)

    The row layer's inputs are divided like the outputs before it: by heads, or evenly. A size that t does not divide
    makes shards that differ by one.

    Attributes:
        entry: the module whose first argument (or the one named `hidden_states`) is x, to which f is applied. Anything
            added to x itself, such as a residual, has to be outside. Undivided parameters inside it are applied to
            this rank's features or heads, such as a normalization of queries; their gradients are all-reduced.
        column: layers of x that are divided by outputs: linear ones, or convolutions without a `row`. With a `row`
            they may all be parameters, [..., outputs, inputs], such as those of a mixture's experts.
        row: the linear layer that is divided by inputs, with g after it; if it is a parameter, g comes after the entry.
            None: the column layers' outputs are gathered.
        heads: the number of heads, or the name of the entry's attribute that holds it; None: no heads.
        sections: the ratio of the widths of consecutive parts in a column layer's outputs.
        local: attributes of the entry by which its forward counts heads, or features of heads: they become this
            rank's numbers.
        inputs: arguments of the entry that are also inputs of column layers, such as the encoder's output in a
            cross-attention: f is applied to them too.
        apart: arguments of the entry that have a gradient but are not inputs of column layers: a residual that is added
            after the row layer, or a bias of the scores that has only this rank's heads.
        per_head: parameters whose last dimension is the heads, if any, such as a relative position bias.
    """

    entry: str
    column: tuple[str, ...]
    row: str | None = None
    heads: int | str | None = None
    sections: tuple[int, ...] = (1,)
    local: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    per_head: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("column", "sections", "local", "inputs", "apart", "per_head"):
            given = getattr(self, name)
            if isinstance(given, str):
                raise ValueError(
                    f"Region({name}={given!r}) is several names, in a tuple: {name}=({given!r},)"
                )
            object.__setattr__(self, name, tuple(given))  # JSON gives lists
        if not self.column:
            such = f"column=({self.entry + '.up'!r},)"
            raise ValueError(f"Region(entry={self.entry!r}, column=()) divides nothing: {such}")
        if not self.sections or min(self.sections) < 1:
            such = "the ratio of their widths, positive integers: sections=(1, 1, 1)"
            raise ValueError(f"Region(sections={self.sections}): {such}")


@dataclass(frozen=True)
class TensorPlan:
    """The parts of a model that are divided; `mpkit.strategies.tensor.find_tensor_plan` finds them in a model.

    >>> plan = TensorPlan((Region("mlp", ("mlp.up",), "mlp.down"),), head="head")
    >>> TensorPlan.from_dict(plan.to_dict()) == plan
    True

    Attributes:
        head: the linear layer that gives a logit for each token of the vocabulary; it is divided by vocabulary. If its
            weight is an embedding's, both are divided.
        sequence: for sequence parallelism, the first module that works on a part of the sequence (dimension 1 of its
            input), and the last one, whose output is whole again. So do all modules between them, in the order of
            `model.named_modules()`.
    """

    regions: tuple[Region, ...]
    embeddings: tuple[str, ...] = ()  # nn.Embedding modules whose vocabulary is divided
    head: str | None = None
    sequence: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        regions = tuple(Region(**one) if isinstance(one, Mapping) else one for one in self.regions)
        object.__setattr__(self, "regions", regions)
        if isinstance(name := self.embeddings, str):
            raise ValueError(f"TensorPlan(embeddings={name!r}) is several names: embeddings=({name!r},)")
        object.__setattr__(self, "embeddings", tuple(self.embeddings))
        if self.sequence is not None:
            object.__setattr__(self, "sequence", tuple(self.sequence))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a dict for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TensorPlan:
        """Make a plan from what `to_dict` returned."""
        return cls(**values)
