"""The variables of nccl and its surroundings: what each means, when to set it, and what those that are set now do.

The table is `variables.csv`; a row without a meaning is a variable that nccl documents and the table does not explain.
Sources: NCCL user guide, "Environment Variables"; PyTorch documentation,
"ProcessGroupNCCL Environment Variables" and "Distributed communication package".
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from mpkit.launch.doctor.probe import Facts

__all__ = ["Variable", "table", "variables"]

PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")


@dataclass(frozen=True)
class Variable:
    """A row of the table.

    Attributes:
        name: the variable.
        values: the values it takes, with | between; "#" is a number, "*" anything.
        default: what holds where it is not set.
        meaning: what it does.
        when: when to set it.
        costs_if, costs: the value that costs something, and what.
    """

    name: str
    values: str
    default: str
    meaning: str
    when: str
    costs_if: str
    costs: str

    def takes(self, value: str) -> bool:
        """Return whether a value is one of those it takes.

        >>> table()["NCCL_DEBUG"].takes("info"), table()["NCCL_DEBUG"].takes("verbose")
        (True, False)
        """
        if self.values == "*":
            return bool(value.strip())
        if self.values == "#":
            return value.strip().lstrip("-").isdecimal()
        return value.strip().upper() in self.values.upper().split("|")


@cache
def table() -> Mapping[str, Variable]:
    """Return the table by the variables' names.

    >>> table()["NCCL_P2P_DISABLE"].costs_if
    '1'
    """
    text = (files(__package__) / "variables.csv").read_text(encoding="utf-8")
    return {row["name"]: Variable(**row) for row in csv.DictReader(text.splitlines())}


Found = Iterator[tuple[str, dict[str, Any]]]


def variables(facts: Facts) -> Found:
    """Yield each variable that is set now, explained; mistyped ones, and values that it does not take."""
    known, environment = table(), facts["environment"]
    set_now = sorted(name for name in environment if name in known or name.startswith(PREFIXES))
    for name in set_now:
        finding, values = _judge(facts, name, environment[name])
        yield finding, {"name": name, "value": environment[name], "idle": "", **values}
    if not set_now:
        yield "variables-none", {}


def _judge(facts: Facts, name: str, value: str) -> tuple[str, dict[str, Any]]:
    """Return the name of the finding about a variable, and the values of its words."""
    known = table()
    if name not in known:
        if f"TORCH_{name}" in known:  # torch's own variables as they were called before torch 2.2
            return "variable-old", {"near": f"TORCH_{name}"}
        near = get_close_matches(name, known, 1, 0.8)
        return "variable-mistyped" if near else "variable-unknown", {"near": "".join(near)}
    row = known[name]
    words = vars(row) | {"name": name}
    if not row.meaning:
        return "variable-unknown", words
    if not row.takes(value):
        options = {"#": "a number", "*": "something"}.get(row.values, row.values.replace("|", ", "))
        return "variable-refuses", words | {"options": options}
    if name.endswith("SOCKET_IFNAME") and not _has_interface(facts, name, value):
        there = facts["interfaces"]
        real = [one for one in there if one != "lo"] or there
        return "variable-interface", words | {"there": ", ".join(there), "real": real[0]}
    words["idle"] = _idle(facts, name)
    if not row.costs_if or value.strip().upper() != row.costs_if:
        return "variable", words | {"costs": ""}
    return "variable" if words["idle"] else "variable-costs", words


def _idle(facts: Facts, name: str) -> str:
    """Return why a variable makes no difference here; "" if it does."""
    gpus = max(len(facts["nvml"].get("gpus", [])), facts["torch"]["gpus"])
    if name.startswith(("NCCL_", "TORCH_NCCL_", "CUDA_")) and gpus < (1 if name.startswith("CUDA_") else 2):
        return "; with fewer than two GPUs nothing reads it" if gpus else "; without GPUs nothing reads it"
    pairs = [link["p2p"] for link in facts["nvml"].get("links", []) if link["p2p"]]
    if name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL") and pairs and "OK" not in pairs:
        return "; these GPUs have no P2P anyway"
    return ""


def _has_interface(facts: Facts, name: str, value: str) -> bool:
    """Return whether this machine has one of the interfaces that a value names."""
    there = facts["interfaces"]
    if value.startswith("^") or not there:
        return True
    wanted = [each for each in value.removeprefix("=").split(",") if each]
    exact = value.startswith("=") or name.startswith("GLOO")
    return any(each == one or (not exact and one.startswith(each)) for each in wanted for one in there)
