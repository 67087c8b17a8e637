"""What a reader of the browser edition finds: notebooks with their stored outputs, and traces of real runs.

start.ipynb           what works without an installation, to be run cell by cell
00-*.ipynb ...        the tutorials: their trainings need PyTorch, and cells beside them open what was recorded
exercises/*.ipynb     the exercises that need no PyTorch
traces/*.mpkit        one small run per strategy, recorded on this machine while the site is built
traces/00-*/*.mpkit   the runs of each tutorial (`tutorials`)
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import torch
import tutorials

import mpkit as mk
from mpkit.course import lab
from mpkit.course.catalogue import of_family
from mpkit.course.exercises.reading_lab import read_the_memory
from mpkit.course.framework.local_trial import shared_room
from mpkit.course.framework.questions import Questions

ROOT = Path(__file__).parents[2]

KERNEL = {"display_name": "Python (Pyodide)", "language": "python", "name": "python"}
"""The one kernel of the site, so that no tutorial asks which to use."""

PLANS = {"pipeline": mk.Plan.pipeline("1f1b", 4, 8), "ddp": mk.Plan.ddp(4), "zero3": mk.Plan.zero(3, 4)}
"""The strategies of the first tutorials by the name of their trace's file."""


def write_contents(folder: Path) -> None:
    """Write the notebooks and traces."""
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "start.ipynb", folder)
    record(folder / "traces")
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        book = nbformat.read(path, as_version=4)
        recorded = tutorials.record(path)
        tutorials.add(book, recorded, path.stem)
        shutil.copytree(recorded, folder / "traces" / path.stem, ignore=shutil.ignore_patterns("*.json"))
        nbformat.write(book, folder / path.name)
    write_exercises(folder / "exercises")
    for path in folder.rglob("*.ipynb"):
        book = nbformat.read(path, as_version=4)
        book.metadata["kernelspec"] = KERNEL
        nbformat.write(book, path)


def write_exercises(folder: Path) -> None:
    """Write the exercises that need no torch, and the traces of the runs that are read in them."""
    (folder / lab.SAVED).mkdir(parents=True)
    for entry in of_family("reading_lab"):
        assert isinstance(entry.exercise, Questions)
        entry.exercise.truth(shared_room())  # plays the runs that the check reads
    for letter in read_the_memory.SHEET:
        read_the_memory.held(letter)  # and this those that only students read
    lab.save_runs(folder / lab.SAVED)
    shared_room().close()
    subprocess.run([sys.executable, Path(__file__).parent / "exercises.py", folder], check=True)


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
