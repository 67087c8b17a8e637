"""The folder of one launch: what the ranks read, and room for what they will write."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpkit.common.disk import name_full_disk
from mpkit.common.launch_folder import RESERVED, Settings, reserve
from mpkit.launch.process.fork_server_client import ForkServerClient

__all__ = ["new_folder"]


def new_folder(
    settings: Settings, meta: Mapping[str, Any], payload: bytes, fork_server: ForkServerClient
) -> Path:
    """Create a folder with all files that the ranks read.

    Args:
        settings, meta, payload: the contents of these files.
        fork_server: removes the folder if this process is killed.

    Raises:
        OSError: the disk has no space for the files that the ranks need.
    """
    files = {
        "settings.json": settings.dumps(),
        "meta.json": json.dumps(meta).encode(),
        "payload.pkl": payload,
    }
    needed = sum(map(len, files.values())) + settings.ranks * sum(RESERVED.values())
    with name_full_disk(tempfile.gettempdir(), needed):
        folder = Path(tempfile.mkdtemp(prefix="mpkit-run-"))
        fork_server.tell(do="folder", folder=str(folder))
        try:
            for name, content in files.items():
                (folder / name).write_bytes(content)
            reserve(folder, settings.ranks)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return folder
