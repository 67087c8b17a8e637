"""The environment variables by which a program under torchrun knows its rank."""

from __future__ import annotations

import os

__all__ = ["OWN", "as_torchrun"]

OWN = "mpkit-"
"""How TORCHELASTIC_RUN_ID begins in the ranks of a Cluster."""


def as_torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for this rank of a run on one machine.

    Args:
        rank: this rank.
        ranks: the world size.
        port: a free port; nothing listens there unless the program opens a store of its own.

    >>> as_torchrun(1, 4, 29500)["LOCAL_RANK"]
    '1'
    """
    return {
        "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "ROLE_RANK": f"{rank}",
        "WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}", "ROLE_WORLD_SIZE": f"{ranks}",
        "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "NODE_RANK": "0", "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}",
        "TORCHELASTIC_RUN_ID": f"{OWN}{os.getppid()}", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip
