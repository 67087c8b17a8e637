"""TensorPlan: which linear layers of a model are divided over the ranks of a tensor-parallel group, and how.

A *region* is what Megatron puts between f and g: layers that are divided by columns (their outputs), what stands
between, and a layer that is divided by rows (its inputs), whose partial results are summed. Nothing else is said: the
model's own forward stays.

    x ──f── column ── GELU ── row ──g── y          an MLP: entry "mlp", column ("mlp.up",), row "mlp.down"
    x ──f── q, k, v ── attention ── out ──g── y    an attention: entry "attn", the same, divided by heads

Names are those of `model.named_modules()`. A `*` stands for any part of a name between two dots, and in `column` and
`row` for what it stood for in `entry`: so one region describes all layers alike.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019,
section 3. Pure Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Region", "TensorPlan"]


@dataclass(frozen=True)
class Region:
    """Layers between an f and a g.

    How a column layer's outputs are divided over t ranks:

        evenly              Region("mlp", ("mlp.up",), "mlp.down")
        by heads            heads="num_heads": whole heads, so many as the attribute of that name at the entry says
        grouped queries     heads="config.num_key_value_heads": k and v by their own heads, q by the groups that
                            belong to them; every layer's width is a multiple of the number of heads
        q, k, v in one      sections=(1, 1, 1): one after another in that ratio of widths, each divided by itself;
                            with 4 query heads a key head sections=(4, 1, 1)

    The row layer's inputs are divided as what comes before it: by heads, or evenly. What t does not divide makes
    shards that differ by one.

    >>> Region("layers.*.attn", ("layers.*.attn.qkv",), "layers.*.attn.out", heads=12, sections=(1, 1, 1)).row
    'layers.*.attn.out'

    Attributes:
        entry: the module whose first argument (or the one named `hidden_states`) is x; f is there. What it adds to x
            itself, such as a residual, has to be outside. Whole parameters within it are used on this rank's features
            or heads, such as a normalization of queries: their gradients are summed over the ranks.
        column: layers of x divided by outputs: linear ones, and convolutions where there is no `row`. With a `row` they
            may all be parameters, [..., outputs, inputs], such as those of a mixture's experts.
        row: the linear layer that is divided by inputs, with g after it; if it is a parameter, g is after the entry.
            None: the column layers' outputs are gathered.
        heads: how many, or the name of the entry's attribute that says so; None: no heads.
        sections: the ratio of widths of what lies one after another in a column layer's outputs.
        local: attributes of the entry by which its forward counts heads, or features of heads: they become what this
            rank has.
        inputs: arguments of the entry that are inputs of column layers too, such as the encoder's output in a
            cross-attention: f is there too.
        apart: arguments of the entry that have a gradient and are no inputs of column layers: a residual that is added
            after the row layer, or a bias of the scores with this rank's heads already.
        per_head: parameters whose last dimension is the heads, such as a relative position bias; where there are any.
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
            raise ValueError(
                f"Region(entry={self.entry!r}, column=()) divides nothing: column=({self.entry + '.up'!r},)"
            )
        if not self.sections or min(self.sections) < 1:
            raise ValueError(
                f"Region(sections={self.sections}): the ratio of their widths, positive integers: sections=(1, 1, 1)"
            )


@dataclass(frozen=True)
class TensorPlan:
    """What of a model is divided. `mpkit.parallel.tensor.find_tensor_plan` makes those of models that it knows.

    >>> plan = TensorPlan((Region("mlp", ("mlp.up",), "mlp.down"),), head="head")
    >>> TensorPlan.from_dict(plan.to_dict()) == plan
    True

    Attributes:
        regions: see `Region`.
        embeddings: whose vocabulary is divided: nn.Embedding.
        head: the linear layer that gives a logit for each token of the vocabulary, which is divided; if its weight
            is an embedding's, both are.
        sequence: for sequence parallelism: the first module to work on a part of the sequence (dimension 1 of its
            input), and the last one, whose output is whole again. Everything from the one to the other, in the order of
            `model.named_modules()`, does.
    """

    regions: tuple[Region, ...]
    embeddings: tuple[str, ...] = ()
    head: str | None = None
    sequence: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        regions = tuple(Region(**one) if isinstance(one, Mapping) else one for one in self.regions)
        object.__setattr__(self, "regions", regions)
        if isinstance(self.embeddings, str):
            raise ValueError(
                f"TensorPlan(embeddings={self.embeddings!r}) is several names: embeddings=({self.embeddings!r},)"
            )
        object.__setattr__(self, "embeddings", tuple(self.embeddings))
        if self.sequence is not None:
            object.__setattr__(self, "sequence", tuple(self.sequence))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> TensorPlan:
        """From what `to_dict` gave."""
        return cls(**said)
