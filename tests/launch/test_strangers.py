"""What strangers on this machine can do to a launch: send objects to gloo's ports, put links into folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mpkit.common.launch_folder import reserve
from mpkit.strategies.data.digest import SampleLog
from mpkit.trace.record.recorder import Recorder

# ---- files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rank0.error", lambda folder: reserve(folder, 1)),
        ("rank0.ops", lambda folder: Recorder(folder, 0, torch.device("cpu"))),
        ("rank0.names", lambda folder: Recorder(folder, 0, torch.device("cpu"))),
        ("rank0.mem", lambda folder: Recorder(folder, 0, torch.device("cpu"))),
        ("rank0.taken", lambda folder: SampleLog(folder, 0)),
    ],
)
def test_a_link_in_a_run_folder_is_not_followed(
    name: str, write: Callable[[Path], Any], tmp_path: Path
) -> None:
    folder, victim = tmp_path / "run", tmp_path / "victim.txt"
    folder.mkdir()
    victim.write_text("precious")
    for target in (victim, tmp_path / "new.txt"):
        (folder / name).symlink_to(target)
        with pytest.raises(FileExistsError):
            write(folder)
        for path in folder.iterdir():
            path.unlink()
    assert victim.read_text() == "precious" and not (tmp_path / "new.txt").exists()
