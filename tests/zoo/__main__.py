"""The zoo: small random models of transformers' architectures, trained by mpkit and by plain PyTorch.

    make test-zoo                       all of them
    make test-zoo ARGS="llama t5"       these
    make test-zoo ARGS="tp2 llama"      by these plans

Each model is trained for three steps in float64 by each plan; the reference is plain PyTorch, with the plan's
micro-batches. A cell of the table says:

    ok         losses and weights are equal to 1e-8
    ok*        to 1e-6, where plain PyTorch differs from itself by more than float64 rounds when it splits the batch:
               parts of the model compute in float32
    refused    a ValueError before a rank started, in the list below the table
    ERROR      anything else that was raised
    WRONG      another result

The exit status is 0 if under pp, ddp and zero3 at least 95 % of the models are equal, under tp at least 70 % of the
decoders, under ep all mixtures of experts, and everything else is refused. tests/zoo is not part of `make test`.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import warnings
from typing import NamedTuple

import torch

import mpkit as mk
from mpkit.strategies.experts.known_experts import find_experts
from tests.zoo.architectures import ARCHITECTURES, Architecture, batch_of, build, loss_of
from tests.zoo.plain import Trained, difference, sgd, train

STEPS = 3
PLANS = {
    "pp2": (mk.Plan.pipeline("1f1b", 2, microbatches=2, batchnorm="local"), 2),
    "ddp2": (mk.Plan.ddp(2), 1),
    "zero3": (mk.Plan.zero(3, 2), 1),
    "tp2": (mk.Plan(tp=2), 1),
    "ep2": (mk.Plan(dp=2, ep=2), 1),
}
"""By column the plan, and its micro-batches."""
LEAST = {"pp2": 0.95, "ddp2": 0.95, "zero3": 0.95, "tp2": 0.70, "ep2": 1.0}
"""The share of models that have to be equal; for tp2 of decoders, for ep2 of mixtures of experts."""


class Cell(NamedTuple):
    """What came of a model under a plan."""

    verdict: str
    why: str = ""


def main(names: list[str]) -> int:
    """Print the table; the exit status."""
    known = [one.name for one in ARCHITECTURES]
    if unknown := [name for name in names if name not in (*known, *PLANS)]:
        print(
            f"No architecture {', '.join(unknown)}. There are: {' '.join(known)}; and plans: {' '.join(PLANS)}"
        )
        return 2
    columns = [column for column in PLANS if column in names] or list(PLANS)
    named = [name for name in names if name not in PLANS] or known
    chosen = [one for one in ARCHITECTURES if one.name in named]
    warnings.simplefilter("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # on the ranks too
    torch.set_num_threads(1)
    begun = time.monotonic()
    table: dict[str, dict[str, Cell]] = {}
    print(f"{'architecture':17}" + "".join(f"{column:>10}" for column in columns))
    with mk.Cluster(2, device="cpu") as cluster:
        for one in chosen:
            table[one.name] = row = _row(cluster, one, columns)
            print(f"{one.name:17}" + "".join(f"{row[c].verdict:>10}" for c in columns), flush=True)
            gc.collect()
    print(f"\n{time.monotonic() - begun:.0f} s\n")
    return _judge(chosen, table, columns)


def _row(cluster: mk.Cluster, one: Architecture, columns: list[str]) -> dict[str, Cell]:
    """One model under these plans."""
    model, loss = build(one), loss_of(one.task)
    torch.manual_seed(1)
    data = [batch_of(one.task) for _ in range(STEPS)]
    plain = {parts: train(model, data, loss, parts) for parts in (1, 2)}
    rounding = difference(plain[1], plain[2])
    row: dict[str, Cell] = {}
    for column in columns:
        plan, parts = PLANS[column]
        if (column == "tp2" and not one.division) or (column == "ep2" and not find_experts(model)):
            row[column] = Cell("-")
            continue
        try:
            run = cluster.train(model, data, plan, loss=loss, optimizer=sgd, steps=STEPS)
        except ValueError as error:
            row[column] = Cell("refused", str(error))
            continue
        except Exception as error:  # a verdict of its own, that fails the zoo
            row[column] = Cell("ERROR", f"{type(error).__name__}: {error}")
            continue
        try:
            run.wait()
            found = Trained(run.losses, run.state_dict())
        except Exception as error:
            row[column] = Cell("ERROR", f"{type(error).__name__}: {error}")
            continue
        row[column] = _compare(difference(found, plain[parts]), rounding)
    return row


def _compare(differs: float, rounding: float) -> Cell:
    if differs <= 1e-8:
        return Cell("ok")
    more = f"differs by {differs:.1e}; plain PyTorch, when it splits the batch, by {rounding:.1e}"
    return Cell("ok*" if differs <= 1e-6 and 1e-12 < rounding <= 1e-6 else "WRONG", more)


def _judge(chosen: list[Architecture], table: dict[str, dict[str, Cell]], columns: list[str]) -> int:
    """Counts, what was not equal, and whether that is enough."""
    for name, row in table.items():
        for column, cell in row.items():
            if cell.verdict != "ok" and cell.why:
                print(f"{name} {column} {cell.verdict}: {_short(cell.why)}")
    print()
    enough = True
    for column in columns:
        least = LEAST[column]
        counted = [one.name for one in chosen if column != "tp2" or one.decoder]
        counted = [name for name in counted if table[name][column].verdict != "-" or column == "tp2"]
        verdicts = [table[name][column].verdict for name in counted]
        equal = sum(verdict in ("ok", "ok*") for verdict in verdicts)
        bad = [n for n, row in table.items() if row[column].verdict in ("ERROR", "WRONG")]
        share = equal / len(counted) if counted else 1.0
        enough = enough and share >= least and not bad
        print(
            f"{column:6} {equal} of {len(counted)}{' decoders' if column == 'tp2' else ''} equal, {share:.0%} "
            f"(at least {least:.0%})" + (f"; neither equal nor refused: {', '.join(bad)}" if bad else "")
        )
    return 0 if enough else 1


def _short(text: str) -> str:
    """On one line."""
    line = " ".join(text.split())
    return line if len(line) < 400 else f"{line[:200]} ... {line[-190:]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
