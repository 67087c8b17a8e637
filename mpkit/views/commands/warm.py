"""`mpkit warm SOCKET`: one process per machine that has imported torch, for the helpers and kernels of all users."""

from __future__ import annotations

import argparse
import os
import sys

from mpkit.common.command_line import Commands, add_command
from mpkit.common.missing_packages import require_torch

__all__ = ["add_warm"]


def add_warm(commands: Commands) -> None:
    """Add the command to the parser's."""
    warm = add_command(
        commands, "warm", "keep torch imported for all users of a machine, as on a JupyterHub",
        "It waits at SOCKET and forks the helper processes and kernels of users whose MPKIT_WARM names that file, so "
        "that they share one copy of torch in memory. Started by root it serves every user, each as that user, within "
        "that user's limits. Linux only. docs/hub.md says how to set up a room.",
        example="mpkit warm /run/mpkit.sock", run=_warm,
    )  # fmt: skip
    warm.add_argument(
        "socket", metavar="SOCKET", help="the file to wait at; an earlier one there is replaced"
    )


def _warm(options: argparse.Namespace) -> None:
    """Become the warm process, with next to no environment: all users may read what is in its memory."""
    from mpkit.launch.process.boot import boot_command

    require_torch("mpkit warm")
    if sys.platform != "linux":
        raise ValueError("mpkit warm needs Linux, which says who is at the other end of a socket")
    folder = os.path.dirname(os.path.abspath(options.socket))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"no file can be made in {folder}: choose another place, such as /tmp/mpkit.sock")
    command = boot_command("mpkit.launch.process.warm_process:main", os.path.abspath(options.socket))
    os.execve(
        command[0], command, {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    )
