"""Removes a run folder whose process was killed. Run as a program, it outlives that process, and then does it.

The process that made the folder has the other end of a pipe. If it closes without a word, the process was killed.
Other processes of the node may write into the folder still: each holds a shared lock on it. The last one may want it
kept, to be read, and leaves a file that says so.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys

__all__ = ["KEPT", "Sweeper", "hold"]

KEPT = "kept"


class Sweeper:
    """The process that sweeps, as seen by the process that made the folder.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a launcher ends whole process groups
        )

    def dismiss(self) -> None:
        """End it: the folder has been removed, or is to stay."""
        self._process.communicate(b".")


def hold(folder: str) -> int:
    """Return a descriptor of a folder; as long as it is open, nobody sweeps the folder."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    fcntl.flock(handle, fcntl.LOCK_SH)
    return handle


def main(folder: str) -> None:
    """Wait for the end of the process that made the folder, and remove it if that process was killed."""
    if os.fork() or os.read(
        0, 1
    ):  # as nobody's child, which those who kill a process with all below it do not find
        return
    fcntl.flock(hold(folder), fcntl.LOCK_EX)  # once nobody else holds it
    if not os.path.lexists(os.path.join(folder, KEPT)):
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(sys.argv[1])
