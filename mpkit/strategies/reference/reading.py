"""`mk.source`: a reference as text, which a notebook highlights."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.resources import files

from mpkit.common.tracebacks import public

SOURCES = {
    "serial": "serial",
    "naive": "naive_model_parallelism", "gpipe": "gpipe", "1f1b": "one_f_one_b",
    "stage": "stage",
    "dp": "dp", "naive-ddp": "naive_ddp", "ddp": "bucketed_ddp",
    "zero-1": "zero1", "zero-2": "zero2", "zero-3": "zero3", "hsdp": "hybrid_shards",
    "f-and-g": "tensor/conjugates", "column-parallel": "tensor/column_parallel_linear",
    "row-parallel": "tensor/row_parallel_linear",
    "parallel-mlp": "tensor/parallel_mlp",
    "parallel-attention": "tensor/parallel_attention",
    "vocabulary-cross-entropy": "tensor/vocabulary_cross_entropy",
    "sequence-parallel": "tensor/sequence_parallel",
    "ring-attention": "ring_attention", "ulysses": "ulysses",
    "moe": "experts/mixture_of_experts", "ep": "experts/expert_parallel",
    "moe-balance": "experts/balance", "moe-exchange": "experts/exchange",
    "2d": "two_dimensions",
}  # fmt: skip
"""The module of `mpkit.strategies.reference` by the name of the strategy."""


class PythonSource(str):
    """Python source. As the last line of a cell it shows itself, highlighted."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_markdown_(self) -> str:
        return f"```python\n{self}```"


@public
def source(name: str) -> PythonSource:
    """Return the reference of a strategy: the whole of it, as its paper has it.

    Args:
        name: one of `SOURCES`, such as "zero-2".

    Raises:
        ValueError: there is no reference of this name.

    >>> print(source("row-parallel").splitlines()[-1])
        return g(ctx, partial, group)
    """
    wanted = str(name).lower().replace("_", "-")
    by_module = {m.rpartition("/")[2].replace("_", "-"): m for m in SOURCES.values()}
    module = SOURCES.get(wanted) or by_module.get(wanted)
    if module is None:
        near = get_close_matches(wanted, SOURCES, n=1, cutoff=0.4)
        meant = f" Is mk.source({near[0]!r}) meant?" if near else ""
        raise ValueError(
            f"mk.source({name!r}): there is no reference of this name.{meant} "
            f"There are: {', '.join(SOURCES)}."
        )
    path = files("mpkit.strategies.reference").joinpath(f"{module}.py")
    return PythonSource(path.read_text(encoding="utf-8"))
