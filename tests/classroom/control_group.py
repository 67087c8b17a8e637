"""A control group for a program that may fork, or fill memory, for ever: its limits hold root too."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.limits import wait_until_gone

ROOT = Path("/sys/fs/cgroup")


@contextmanager
def control_group(tasks: int, memory: int) -> Iterator[list[str]]:
    """Make a group below our own, of that many processes and threads and bytes; yield the beginning of a command that
    joins it. Whatever is in it at the end is killed.

    Raises:
        OSError: processes cannot be limited here. That takes write access to control groups, of version 1 or 2.
    """
    limits = {"pids.max": tasks, "memory.max": memory, "memory.limit_in_bytes": memory}
    groups, limited = [], set()
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            parent = ROOT / controllers / own.lstrip("/")
            if controllers not in ("", "pids", "memory") or not (parent / "cgroup.procs").exists():
                continue
            with suppress(OSError):
                if not controllers:  # version 2
                    (parent / "cgroup.subtree_control").write_text("+pids +memory")
                group = parent / f"mpkit-{os.getpid()}"
                group.mkdir()
                groups.append(group)
                for name in limits.keys() & {path.name for path in group.iterdir()}:
                    (group / name).write_text(str(limits[name]))
                    limited.add(name)
        if "pids.max" not in limited:
            raise OSError(f"no control group below {ROOT} is ours to limit processes")
        yield [
            "sh",
            "-c",
            "".join(f"echo $$ > {group}/cgroup.procs && " for group in groups) + 'exec "$@"',
            "sh",
        ]
    finally:
        for group in groups:
            while pids := [int(pid) for pid in (group / "cgroup.procs").read_text().split()]:
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                wait_until_gone(pids)
            group.rmdir()
