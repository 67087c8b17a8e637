"""The formats by name: formats.toml's rows, each with the code that its framework needs."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from mpkit.plan.formats.frameworks import ACCELERATE, DEEPSPEED, FSDP, TRAINER
from mpkit.plan.formats.keys import Format, FormatCode, FormatKey
from mpkit.plan.formats.launchers import SLURM, TF_CONFIG, TORCHRUN
from mpkit.plan.formats.megatron import MEGATRON
from mpkit.plan.formats.python_code import python_code
from mpkit.plan.formats.script import command
from mpkit.plan.formats.syntax import JSON, YAML, Syntax
from mpkit.plan.formats.torchtitan import SECTIONS, TORCHTITAN, rename_older

__all__ = ["FORMATS", "format_of"]

CODE: Mapping[str, FormatCode] = {
    "torchrun": TORCHRUN, "deepspeed": DEEPSPEED, "accelerate": ACCELERATE, "fsdp": FSDP, "megatron": MEGATRON,
    "torchtitan": TORCHTITAN, "trainer": TRAINER, "slurm": SLURM, "tf_config": TF_CONFIG,
}  # fmt: skip
FORMATS = tuple(CODE)
"""The names of the formats."""


@lru_cache(1)
def _tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("formats.toml").read_text("utf-8"))


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
    table, code = _tables()[name], CODE[name]
    keys = tuple(
        FormatKey(key, written, says, comment, code.readers[says.split()[0]] if says[:1] == "@" else None)
        for key, written, says, comment in _rows(table["rows"])
    )
    common: set[str] = set()
    for word in table.get("common", []):
        common |= {row[0] for row in _rows([word])} if word in _tables() else {word}
    return Format(
        name, table["title"], _syntax(name, table, code, keys), keys, code, table.get("cannot", {}),
        table.get("otherwise", ""), frozenset(common),
    )  # fmt: skip


def _rows(rows: list[Any]) -> Iterator[list[str]]:
    """Yield rows, and in place of a group's name its rows, which "-unwritten" reads only."""
    for row in rows:
        if isinstance(row, str):
            group, _, unwritten = row.partition("-")
            for name, written, says, comment in _tables()[group]["rows"]:
                yield [name, "" if unwritten else written, says, comment]
        else:
            yield row


def _syntax(name: str, table: Mapping[str, Any], code: FormatCode, keys: tuple[FormatKey, ...]) -> Syntax:
    if table["syntax"] == "command":
        return command(code.body, table.get("flags", ()), table.get("several", ()))
    if table["syntax"] == "python":
        sections = {kind: section for section, kind in SECTIONS.items()} if name == "torchtitan" else {}
        return python_code(code.body, sections, lambda values: rename_older(values, keys))
    return {"json": JSON, "yaml": YAML}[table["syntax"]]
