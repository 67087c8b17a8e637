"""What a stranger who reaches a launcher's store, or has been in a folder before, can have ranks do: nothing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore, distributed_c10d

from mpkit.common.disk import write_whole
from mpkit.common.launch_folder import reserve
from mpkit.errors import MpkitError
from mpkit.launch.external.greeting import greet
from mpkit.launch.external.mirror import MOST_PACKET, FileMirror
from mpkit.launch.external.own_rank import Results
from mpkit.launch.external.packets import GROWING
from mpkit.launch.external.secret import Secret, find_secret
from mpkit.launch.external.signed_store import SignedStore
from mpkit.launch.external.sweeper import KEPT, Sweeper, hold
from mpkit.launch.process.seal import Seal, sign_objects
from mpkit.strategies.data.digest import SampleLog
from mpkit.trace import OP
from mpkit.trace.record.recorder import Recorder
from tests.limits import wait_for

KEY = b"correct horse battery staple"


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=10), wait_for_workers=False)


class Runs:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


# ---- the secret ----------------------------------------------------------------------------------------------


def test_a_secret_is_a_file_that_nobody_else_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found: list[Secret] = []
    threads = [threading.Thread(target=lambda: found.append(find_secret({}))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({each.key for each in found}) == 1 and len(found[0].key or b"") == 64
    file = tmp_path / ".config/mpkit/secret"
    assert file.stat().st_mode & 0o777 == 0o600 and os.listdir(file.parent) == ["secret"]
    file.chmod(0o640)
    assert find_secret({}).key is None and "nobody else may read" in find_secret({}).source
    real = file.rename(tmp_path / "elsewhere")
    file.symlink_to(real)
    assert find_secret({}).key is None
    monkeypatch.setenv("HOME", "/dev/null")
    assert find_secret({}).key is None and "Not a directory" in find_secret({}).source
    assert find_secret({"MPKIT_SECRET": KEY.decode()}).key == KEY
    with pytest.raises(ValueError, match=r"has 5 characters.*export MPKIT_SECRET="):
        find_secret({"MPKIT_SECRET": "short"})


def greeted(store: TCPStore, secrets: list[Secret]) -> list[Any]:
    """What two processes with these secrets have from their greetings: a seal, or an error."""
    outcomes: list[Any] = [None, None]
    parts = [SignedStore(store.clone(), Seal(None)) for _ in secrets]

    def wait(part: SignedStore) -> list[bytes]:
        part.wait(["hello0", "hello1"])
        return part.multi_get(["hello0", "hello1"])

    def greets(rank: int) -> None:
        place: Any = SimpleNamespace(rank=rank, host="here", address="a", port=1)
        try:
            told, outcomes[rank] = greet(
                parts[rank], place, secrets[rank], {"n": rank}, lambda: wait(parts[rank])
            )
            assert [each["n"] for each in told] == [0, 1]
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=greets, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_only_processes_with_the_same_secret_form_a_launch(store: TCPStore) -> None:
    first, second = greeted(store, [Secret(KEY, "a"), Secret(KEY, "b")])
    assert second.check("here", first.sign("here", b"x")) == b"x"
    for each in ("hello0", "hello1"):
        store.delete_key(f"mpkit/{each}")
    other, _ = greeted(store, [Secret(KEY, "a"), Secret(KEY, "b")])
    with pytest.raises(MpkitError, match="no process of this launch"):  # another launch with this secret
        other.check("here", first.sign("here", b"x"))


@pytest.mark.parametrize(
    ("other", "says"),
    [(Secret(KEY[::-1], "b"), "rank . has another secret than rank"), (Secret(None, "no home"), "has none")],
)
def test_another_secret_or_none_is_an_error_that_says_what_to_do(
    store: TCPStore, other: Secret, says: str
) -> None:
    for error in greeted(store, [Secret(KEY, "a"), other]):
        assert isinstance(error, ValueError)
        assert says in str(error).replace("rank 0 has another", "rank . has another").replace(
            "rank 1 has another", "rank . has another"
        )
        assert "export MPKIT_SECRET=" in str(error)


# ---- the store, and what is unpickled ------------------------------------------------------------------------


def test_a_value_is_believed_only_under_its_key_and_in_its_launch(store: TCPStore) -> None:
    ours, theirs = SignedStore(store, Seal(KEY)), store.clone()
    ours.set("control", json.dumps({"n": 1}))
    signed = theirs.get("mpkit/control")
    for key, value in (
        ("control", json.dumps({"n": 2}).encode()),
        ("beat1", signed),
        ("control", signed[:-1] + b"2"),
        ("control", Seal(KEY[::-1]).sign("mpkit/control", b"{}")),
        ("control", b""),
    ):
        theirs.set(f"mpkit/{key}", value)
        for get in (ours.get, lambda key: ours.multi_get([key])):
            with pytest.raises(MpkitError, match=f"mpkit/{key}: no process of this launch wrote this"):
                get(key)


def objects(seal: Seal, content: bytes) -> Any:
    """What torch.distributed makes of bytes that a peer sends as an object."""
    signed = sign_objects(seal)
    try:
        tensor = torch.tensor(list(content), dtype=torch.uint8)
        return distributed_c10d._tensor_to_object(tensor, len(content), None)
    finally:
        signed.restore()


@pytest.mark.parametrize("seal", [Seal(KEY), Seal(None)], ids=["secret", "none"])
def test_nothing_is_unpickled_that_a_stranger_sent(seal: Seal, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    file = io.BytesIO()
    torch.save(Runs(ran), file)
    for content in (pickle.dumps(Runs(ran)), file.getvalue(), b"", b"x" * 100):
        with pytest.raises(MpkitError):
            objects(seal, content)
        if not seal:
            results = Results(seal)
            results.append(content)
            with pytest.raises(MpkitError, match=r"no secret.*export MPKIT_SECRET="):
                results.read(0)
            results.close()
    assert not ran.exists()
    signed = sign_objects(seal)
    sent, _ = distributed_c10d._object_to_tensor({"a": [1, torch.ones(2)]}, torch.device("cpu"), None)
    signed.restore()
    assert objects(seal, sent.numpy().tobytes())["a"][0] == 1


def packet(fields: dict[str, Any], which: list[int], rows: int, *, body: bytes | None = None) -> bytes:
    told = {"ops": 1, "state": 0, "error": None, "axes": "", "mem": 0, "log": 0, "sent": 0} | fields
    parts = [json.dumps(told).encode(), np.array(which, np.int64).tobytes(), np.zeros(rows, OP).tobytes()]
    parts += [b""] * (len(GROWING) + 2)
    return zlib.compress(
        b"".join(struct.pack("<q", len(each)) + each for each in parts) if body is None else body
    )


@pytest.mark.parametrize(
    "hostile",
    [
        packet({"ops": 2**60}, [2**60 - 1], 1),
        packet({"ops": 10}, [2**40], 1),
        packet({"ops": 10}, [-1], 1),
        packet({"ops": -5}, [], 0),
        packet({"ops": "many"}, [], 0),
        packet({}, [], 0, body=bytes(2 * MOST_PACKET)),
        packet({}, [], 0, body=struct.pack("<q", -8)),
        packet({}, [], 0, body=struct.pack("<q", 1)),
        b"no zlib",
    ],
)
def test_a_packet_writes_no_more_than_a_rank_can_have_recorded(hostile: bytes, tmp_path: Path) -> None:
    reserve(tmp_path, 1)
    mirror = FileMirror(tmp_path, 0, 0)
    mirror.take(packet({}, [0], 1))
    with pytest.raises(MpkitError, match="rank 0 has sent a packet that cannot be read"):
        mirror.take(hostile)
    mirror.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 100_000


# ---- files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rank0.error", lambda folder: reserve(folder, 1)),
        ("rank0.ops", lambda folder: Recorder(folder, 0, torch.device("cpu"))),
        ("rank0.names", lambda folder: Recorder(folder, 0, torch.device("cpu"))),
        ("rank0.mem", lambda folder: Recorder(folder, 0, torch.device("cpu"))),
        ("rank0.ops", lambda folder: FileMirror(folder, 0, 0)),
        ("rank0.taken", lambda folder: FileMirror(folder, 0, 0)),
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


def test_a_link_where_a_file_is_written_whole_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("precious")
    (tmp_path / "meta.json.partial").symlink_to(victim)
    write_whole(tmp_path / "meta.json", b"{}")
    assert victim.read_text() == "precious" and (tmp_path / "meta.json").read_text() == "{}"


@pytest.mark.parametrize("told", ["killed", "dismissed", "kept"])
def test_a_folder_is_swept_once_its_process_is_killed_and_nobody_uses_it(told: str, tmp_path: Path) -> None:
    folder, others = tmp_path / "run", tmp_path / "others"
    folder.mkdir(), others.mkdir()
    (others / "file").touch()
    (folder / "link").symlink_to(others)
    if told == "dismissed":
        Sweeper(str(folder)).dismiss()
        assert folder.exists()
        return
    held = hold(str(folder))  # by another rank of the node
    program = (
        "import os, sys; from mpkit.launch.external.sweeper import Sweeper; s = Sweeper(sys.argv[1]);"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)])
    assert folder.exists()
    if told == "kept":
        (folder / KEPT).touch()
    os.close(held)
    if told == "killed":
        wait_for(lambda: not folder.exists())
    else:  # it forks once, and a single look can see the parent no more and the child not yet
        wait_for(lambda: not _sweeps(folder) and not _sweeps(folder))
    assert folder.exists() == (told == "kept") and (others / "file").exists()


def _sweeps(folder: Path) -> bool:
    """Return whether a process runs whose command names the folder."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            commands.append(path.read_bytes())
    return any(str(folder).encode() in command for command in commands)
