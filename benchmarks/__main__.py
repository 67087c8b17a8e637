"""Run every benchmark, print a table, write benchmarks/results.json.

python -m benchmarks                          all benchmarks
python -m benchmarks launch                   those with this word in their module's name
python -m benchmarks costs watch              one function of bench_costs
python -m benchmarks beside "data parallel"   the pairs whose title has these words

Each row is written as soon as it is measured.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
FILE = HERE / "results.json"


def machine() -> dict[str, Any]:
    """Return what a reader needs to know about the machine that the figures were measured on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


def main(words: list[str]) -> None:
    """Measure, print and write."""
    modules = sorted(path.stem for path in HERE.glob("bench_*.py"))
    chosen = [name for name in modules if not words or any(word in name for word in words)]
    if not chosen:
        sys.exit(f"no benchmark is named like {' or '.join(words)}; there are {', '.join(modules)}")
    console = Console()
    where = machine()
    results: list[dict[str, Any]] = []
    for name in chosen:
        console.print(f"[dim]{name} ...[/dim]")
        for row in import_module(f"benchmarks.{name}").measure():
            results.append({**row, "machine": where})
            write(results)
    table = Table(title=f"{where['cpu']}, {where['cores']} cores, torch {where['torch']}")
    for column in ("name", "value", "unit", "ratio", "against"):
        table.add_column(column, justify="right" if column in ("value", "ratio") else "left")
    for row in results:
        ratio = "" if row.get("ratio") is None else f"{row['ratio']:.3g}"
        table.add_row(row["name"], f"{row['value']:.4g}", row["unit"], ratio, row.get("against") or "")
    console.print(table)
    if not words:
        FILE.write_text(json.dumps(results, indent=1) + "\n")  # rows of benchmarks that are no more go
    console.print(f"written to {FILE.relative_to(Path.cwd()) if FILE.is_relative_to(Path.cwd()) else FILE}")


def write(results: list[dict[str, Any]]) -> None:
    """Replace rows of the file by those of the same name that have been measured now; the others stay."""
    fresh = {row["name"] for row in results}
    kept = [row for row in json.loads(FILE.read_text()) if row["name"] not in fresh] if FILE.exists() else []
    FILE.write_text(json.dumps(kept + results, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
