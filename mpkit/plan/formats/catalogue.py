"""The formats by name: formats.toml's tables, each with the code that its framework needs."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache

from mpkit.plan.formats.frameworks import ACCELERATE, DEEPSPEED, FSDP, MEGATRON, TRAINER
from mpkit.plan.formats.launchers import SLURM, TF_CONFIG, TORCHRUN
from mpkit.plan.formats.python_code import python_code
from mpkit.plan.formats.script import command
from mpkit.plan.formats.syntax import JSON, YAML, Syntax
from mpkit.plan.formats.table import Format, FormatCode, FormatKey, rows_of, tables
from mpkit.plan.formats.torchtitan import CLASSES, TORCHTITAN

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
    table, code = tables()[name], CODE[name]
    keys = tuple(
        FormatKey(key, written, says, comment, code.readers[says.split()[0]] if says[:1] == "@" else None)
        for key, written, says, comment in rows_of(name)
    )
    common: set[str] = set()
    for word in table.get("common", []):
        common |= {row[0] for row in rows_of(word)} if word in tables() else {word}
    kinds: dict[str, Syntax] = {"json": JSON, "yaml": YAML}
    if table["syntax"] == "command":
        syntax = command(code.body, table.get("flags", ()))
    elif table["syntax"] == "python":
        syntax = python_code(code.body, CLASSES if name == "torchtitan" else {})
    else:
        syntax = kinds[table["syntax"]]
    return Format(
        name,
        table["title"],
        syntax,
        keys,
        code,
        table.get("cannot", {}),
        table.get("otherwise", ""),
        frozenset(common),
    )
