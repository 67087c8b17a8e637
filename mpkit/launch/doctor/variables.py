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

from mpkit.launch.doctor.probe import Facts
from mpkit.launch.doctor.report import CheckupFinding, Level

__all__ = ["Variable", "table", "variables"]

PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
TOPICS = ("nccl time-outs", "slow scaling")

OLD = {
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
}
"""torch's own variables as they were called before torch 2.2."""


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


def variables(facts: Facts, gpus: int) -> Iterator[CheckupFinding]:
    """Yield each variable that is set now, explained; mistyped ones, and values that it does not take.

    Args:
        facts: what `probe` returned.
        gpus: how many there are.
    """
    known, environment = table(), facts["environment"]
    set_now = sorted(name for name in environment if name in known or name.startswith(PREFIXES))
    for name in set_now:
        yield _one(facts, name, environment[name], known, gpus)
    if not set_now:
        yield CheckupFinding(
            "variables",
            Level.FINE,
            "No variable of nccl or gloo is set: their defaults suit most machines.",
            "the environment",
            fix="mpkit doctor variables  # all of them, with when to set which",
            topics=TOPICS,
        )


def _one(facts: Facts, name: str, value: str, known: Mapping[str, Variable], gpus: int) -> CheckupFinding:
    seen = f"{name}={value}"
    row = known.get(name)
    if row is None:
        return _unknown(name, value, known)
    if not row.meaning:
        what = f"{name}: nccl documents it, and this table does not explain it."
        return CheckupFinding("variables", Level.NOTE, what, seen, topics=TOPICS)
    if not row.takes(value):
        options = {"#": "a number", "*": "something"}.get(row.values, row.values.replace("|", ", "))
        return CheckupFinding(
            "variables",
            Level.COSTS,
            f"{name} does not take {value!r}: {options}.",
            seen,
            f"the default holds ({row.default}), not what was meant",
            f"unset {name}  # {row.when}",
            TOPICS,
        )
    if name.endswith("SOCKET_IFNAME") and (finding := _interface(facts, name, value)) is not None:
        return finding
    costs = row.costs_if and value.strip().upper() == row.costs_if
    idle, what = _idle(facts, name, gpus), f"{name}: {row.meaning}"
    if costs and not idle:
        return CheckupFinding(
            "variables", Level.COSTS, what, seen, row.costs, f"unset {name}  # {row.when}", TOPICS
        )
    when = f"when to set it: {row.when}"
    return CheckupFinding(
        "variables", Level.NOTE, what, seen + idle, row.costs if costs else "", when, TOPICS
    )


def _idle(facts: Facts, name: str, gpus: int) -> str:
    """Return why a variable makes no difference here; "" if it does."""
    if (
        name.startswith(("NCCL_", "TORCH_NCCL_", "CUDA_"))
        and gpus < 2
        and not (name.startswith("CUDA_") and gpus)
    ):
        return "; with fewer than two GPUs nothing reads it" if gpus else "; without GPUs nothing reads it"
    pairs = [link["p2p"] for link in facts["nvml"].get("links", []) if link["p2p"]]
    if name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL") and pairs and "OK" not in pairs:
        return "; these GPUs have no P2P anyway"
    return ""


def _unknown(name: str, value: str, known: Mapping[str, Variable]) -> CheckupFinding:
    seen = f"{name}={value}"
    if name in OLD:
        return CheckupFinding(
            "variables",
            Level.COSTS,
            f"{name} is called {OLD[name]} since torch 2.2.",
            seen,
            "newer versions may ignore the old name",
            f"export {OLD[name]}={value}; unset {name}",
            TOPICS,
        )
    near = get_close_matches(name, known, 1, 0.8)
    if not near:
        return CheckupFinding(
            "variables", Level.NOTE, f"{name}: no table here knows it.", seen, topics=TOPICS
        )
    return CheckupFinding(
        "variables",
        Level.COSTS,
        f"There is no {name}: did you mean {near[0]}?",
        seen,
        "it is ignored without a word",
        f"export {near[0]}={value}; unset {name}",
        TOPICS,
    )


def _interface(facts: Facts, name: str, value: str) -> CheckupFinding | None:
    """Return a finding if the value names interfaces, and this machine has none of them."""
    there = facts["interfaces"]
    if value.startswith("^") or not there:
        return None
    wanted = [each for each in value.removeprefix("=").split(",") if each]
    exact = value.startswith("=") or name.startswith("GLOO")
    if any(each == one or (not exact and one.startswith(each)) for each in wanted for one in there):
        return None
    real = [one for one in there if one != "lo"] or list(there)
    return CheckupFinding(
        "variables",
        Level.COSTS,
        f"{name} names {value}, and this machine has {', '.join(there)}.",
        f"{name}={value}",
        "process groups fail at the start, or wait for each other until they time out",
        f"export {name}={real[0]}",
        ("nccl time-outs",),
    )
