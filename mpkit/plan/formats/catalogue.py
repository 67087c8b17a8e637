"""The formats by name: formats.toml's tables, each with the code that its framework needs."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache

from mpkit.plan.formats.frameworks import ACCELERATE, DEEPSPEED, FSDP, MEGATRON, TRAINER
from mpkit.plan.formats.launchers import SLURM, TF_CONFIG, TORCHRUN
from mpkit.plan.formats.table import Format, FormatCode
from mpkit.plan.formats.torchtitan import TORCHTITAN

__all__ = ["FORMATS", "format_of"]

CODE: Mapping[str, FormatCode] = {
    "torchrun": TORCHRUN, "deepspeed": DEEPSPEED, "accelerate": ACCELERATE, "fsdp": FSDP, "megatron": MEGATRON,
    "torchtitan": TORCHTITAN, "trainer": TRAINER, "slurm": SLURM, "tf_config": TF_CONFIG,
}  # fmt: skip
FORMATS = tuple(CODE)
"""The names of the formats."""


@lru_cache
def format_of(name: str) -> Format:
    """Return the format with this name.

    Raises:
        ValueError: there is none.
    """
    if name not in FORMATS:
        near = get_close_matches(str(name).lower(), FORMATS, 1, 0.4) or ["deepspeed"]
        raise ValueError(
            f"There is no format {name!r}. There are {', '.join(map(repr, FORMATS))}. Did you mean "
            f"plan.to({near[0]!r})?"
        )
    return Format(name, CODE[name])
