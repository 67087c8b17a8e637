"""`python -m mpkit.launch.notebook.warm_kernel -f FILE`: a Jupyter kernel that the machine's warm process forks.

A kernel that has trained something holds 280 MB, nearly all of it torch. Forked from the warm process
(`mpkit.launch.process.warm_process`), which has imported all that, it holds a tenth. For Jupyter the kernel is this
small process, which

    asks      for a kernel, and becomes an ordinary one if MPKIT_WARM is not set, or the warm process rejects it
    forwards  the signals that interrupt and end a kernel
    waits     for the kernel's end; the kernel ends if this process does
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from mpkit.launch.process.boot import boot_environment
from mpkit.launch.process.warm_fork import WarmFork, WarmProcessRejects

__all__ = ["main", "run"]


def main(arguments: list[str]) -> NoReturn:
    """Be a kernel for Jupyter, which gives these arguments to ipykernel."""
    path = os.environ.get("MPKIT_WARM", "")
    try:
        kernel = WarmFork(path, "mpkit.launch.notebook.warm_kernel:run", tuple(arguments), boot_environment())
    except WarmProcessRejects as reason:
        print(f"mpkit: an ordinary kernel, since MPKIT_WARM={path}: {reason}", file=sys.stderr)
        os.execv(sys.executable, [sys.executable, "-m", "ipykernel_launcher", *arguments])

    def forward(number: int, _: FrameType | None) -> None:
        if kernel.poll() is None:
            os.kill(kernel.pid, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    kernel.wait()
    os._exit(0)


def run(*arguments: str) -> None:
    """Run ipykernel in a process that the warm process has forked, until the process that asked for it is gone."""
    from ipykernel.kernelapp import launch_new_instance

    asker = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.environ.pop("JPY_PARENT_PID", None)  # ipykernel would end, since its parent is the warm process

    def end_with_asker() -> None:
        os.read(asker, 1)  # it writes nothing, so this is the end of the pipe
        os._exit(1)

    threading.Thread(target=end_with_asker, name="mpkit-asker", daemon=True).start()
    sys.path.insert(0, "")  # as an ordinary kernel has it: the notebook's folder
    sys.argv = ["ipykernel_launcher", *arguments]
    launch_new_instance()


if __name__ == "__main__":
    main(sys.argv[1:])
