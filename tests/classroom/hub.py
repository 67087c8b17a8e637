"""A room on one machine, as a JupyterHub has it: a server, a kernel and ranks for each student.

    python -m tests.classroom.hub                      (10 students: as many per core as 40 on 8 cores)
    python -m tests.classroom.hub --students 4 --rounds 1

Each student has a JupyterLab server and a kernel. In each round a student reads for some seconds (drawn at random),
trains a small GPT on four ranks, and hands in an answer. It prints how long students waited, and the memory of all
processes by kind: each shared page counts once, divided among those that share it (PSS). No hub's proxy and no browser
take part. A cell that fails ends the program with status 1.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from mpkit.course.catalogue import find

EXERCISE = "naive-ddp"
BEGIN = """
import torch
import mpkit as mk
from mpkit.data import text_batches
from mpkit.models import GPT, next_token_loss
model, data = GPT(layers=4, width=64), text_batches(batch=16, length=32, steps=4)
cluster = mk.Cluster(ranks=4, device="cpu")
"""
TRAIN = """
run = cluster.train(
    model, data, mk.Plan.gpipe(4, 4), loss=next_token_loss, optimizer=torch.optim.AdamW, steps=4, show=False
).wait()
assert run.proof
"""
REST = """
cluster._helper.fork_server.close()
"""


class Student:
    """A student's server and kernel."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.server = subprocess.Popen(
            [
                *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.port=0"),
                *("--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={folder}"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "JUPYTER_RUNTIME_DIR": str(folder)},
        )
        self.kernel = KernelManager()
        self.kernel.start_kernel(cwd=str(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.client: BlockingKernelClient = self.kernel.blocking_client()
        self.client.start_channels()
        self.waited: dict[str, list[float]] = {"train": [], "check": []}

    def execute(self, code: str) -> float:
        """Run a cell; return the seconds that it took.

        Raises:
            RuntimeError: it raised.
        """
        began = time.monotonic()
        reply = self.client.execute_interactive(code, timeout=600, output_hook=lambda message: None)
        if reply["content"]["status"] != "ok":
            raise RuntimeError("\n".join(reply["content"]["traceback"]))
        return time.monotonic() - began

    def learn(self, rounds: int, think: float, drawn: random.Random) -> None:
        """Read, train, hand in; several times."""
        entry = find(EXERCISE)
        self.execute(
            BEGIN
            + entry.given_code
            + "\nfrom torch import Tensor, nn\nfrom torch.nn import functional as F\n"
            + entry.source.plain
        )
        name = entry.exercise.name_of_answer
        for _ in range(rounds):
            time.sleep(drawn.uniform(0, 2 * think))
            self.waited["train"].append(self.execute(TRAIN))
            time.sleep(drawn.uniform(0, 2 * think))
            check = f"checked = mk.check({EXERCISE!r}, {name})\nassert checked.passed or checked.not_judged, checked"
            self.waited["check"].append(self.execute(check))

    def close(self) -> None:
        """End the kernel and the server."""
        self.client.stop_channels()
        self.kernel.shutdown_kernel(now=True)
        self.server.kill()
        self.server.wait()


def held_by_kind() -> Counter[str]:
    """Return the bytes of all processes below this one, by what they are."""
    held: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        try:
            held[kind_of(process)] += process.memory_full_info().pss
        except psutil.Error:
            continue
    return held


def kind_of(process: psutil.Process) -> str:
    """Return what a process is, by how it was started and whose child it is."""
    above = [process, *process.parents()]
    started = [" ".join(each.cmdline()) for each in above]
    depth = sum("fork_server:main" in command for command in started)
    if "jupyterlab" in started[0]:
        return "servers"
    if "fork_server:main" in started[0]:
        return ("helpers", "ranks")[depth - 1]
    return ("kernels", "ranks")[bool(depth)]


def describe(held: Counter[str], students: int) -> str:
    """Return the memory in words."""
    parts = ", ".join(f"{kind} {held[kind] / 2**20:,.0f}" for kind in sorted(held))
    return (
        f"{held.total() / 2**20:,.0f} MiB ({parts}); per student {held.total() / students / 2**20:,.0f} MiB"
    )


def main() -> None:
    """Run a room, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--students", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--think", type=float, default=20.0, help="mean seconds between two cells")
    asked = parser.parse_args()
    highest: Counter[str] = Counter()
    over = threading.Event()

    def sample() -> None:
        nonlocal highest
        while not over.wait(1.0):
            highest = max(highest, held_by_kind(), key=lambda held: held.total())

    with tempfile.TemporaryDirectory() as folder:
        students = [Student(Path(folder) / f"{number}") for number in range(asked.students)]
        watch = threading.Thread(target=sample)
        watch.start()
        try:
            with ThreadPoolExecutor(len(students)) as pool:
                list(
                    pool.map(
                        lambda pair: pair[1].learn(asked.rounds, asked.think, random.Random(pair[0])),
                        enumerate(students),
                    )
                )
                between = held_by_kind()
                list(pool.map(lambda student: student.execute(REST), students))
            over.set()
            print("highest:", describe(highest, len(students)))
            print("between two runs:", describe(between, len(students)))
            print("clusters idle:", describe(held_by_kind(), len(students)))
            for kind in ("train", "check"):
                seconds = sorted(second for student in students for second in student.waited[kind])
                print(f"{kind}: median {median(seconds):.1f} s, longest {seconds[-1]:.1f} s")
        finally:
            over.set()
            watch.join()
            for student in students:
                student.close()


if __name__ == "__main__":
    main()
