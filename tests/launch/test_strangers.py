"""What strangers on this machine can do to a launch: send objects to gloo's ports, put links into folders."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from mpkit.common.launch_folder import reserve
from mpkit.errors import MpkitError
from mpkit.launch.process.seal import sign_objects
from mpkit.strategies.data.digest import SampleLog
from mpkit.trace.record.recorder import Recorder


class Runs:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


def pickled(value: Any) -> bytes:
    file = io.BytesIO()
    c10d._pickler(file).dump(value)  # type: ignore[attr-defined]
    return file.getvalue()


def unpickled(content: bytes) -> Any:
    return c10d._unpickler(io.BytesIO(content)).load()  # type: ignore[attr-defined]


def test_nothing_is_unpickled_that_a_stranger_sent(tmp_path: Path) -> None:
    plain, other = pickled(Runs(tmp_path / "ran")), b""
    for secret in (b"of another launch", b"of this launch"):
        signed = sign_objects(secret)
        try:
            assert unpickled(pickled({"loss": 0.5})) == {"loss": 0.5}
            for stranger in (plain, other, b"", b"short"):
                if secret == b"of this launch":
                    with pytest.raises(MpkitError, match="no process of this launch wrote this"):
                        unpickled(stranger)
            other = pickled(Runs(tmp_path / "ran"))
        finally:
            signed.restore()
    assert not (tmp_path / "ran").exists()


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
