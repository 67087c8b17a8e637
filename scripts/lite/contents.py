"""What a reader of the browser edition finds: notebooks with their stored outputs, and traces of real runs.

start.ipynb       what works without an installation, to be run cell by cell
00-*.ipynb ...    the tutorials, to be read; their trainings need PyTorch
traces/*.mpkit    one small run per strategy, recorded on this machine while the site is built
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

import mpkit as mk

ROOT = Path(__file__).parents[2]

KERNEL = {"display_name": "Python (Pyodide)", "language": "python", "name": "python"}
"""The one kernel of the site, so that no tutorial asks which to use."""

PLANS = {"pipeline": mk.Plan.pipeline("1f1b", 4, 8), "ddp": mk.Plan.ddp(4), "zero3": mk.Plan.zero(3, 4)}
"""The strategies of the first tutorials by the name of their trace's file."""


def write_contents(folder: Path) -> None:
    """Write the notebooks and traces."""
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "start.ipynb", folder)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        notebook["metadata"]["kernelspec"] = KERNEL
        (folder / path.name).write_text(json.dumps(notebook, ensure_ascii=False), encoding="utf-8")
    record(folder / "traces")


def record(folder: Path) -> None:
    """Train a small GPT by each of the plans on four processes, and save what was recorded."""
    folder.mkdir()
    torch.manual_seed(0)
    model = mk.models.GPT(layers=4, length=32)
    tokens = torch.randint(0, 256, (16, 33))
    batch = tokens[:, :-1], tokens[:, 1:]
    with mk.Cluster(ranks=4, device="cpu") as cluster:
        for name, plan in PLANS.items():
            run = cluster.train(
                model, [batch], plan,
                loss=mk.models.next_token_loss, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3), steps=2,
            )  # fmt: skip
            run.wait()
            run.trace.save(folder / f"{name}.mpkit")
