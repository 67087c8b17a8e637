"""A stranger at the store of a launch forges what it can: no rank writes, removes or runs what it wants."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.limits import wait_for
from tests.nodes.hosts import HERE, _forks, launched
from tests.nodes.stranger import forge

pytestmark = [pytest.mark.alone, pytest.mark.slow]


@pytest.mark.parametrize("home", ["a secret", pytest.param("no secret", marks=pytest.mark.soak)])
@pytest.mark.parametrize("which", ["folders", "verdicts", "all"])
def test_a_stranger_at_the_store(which: str, home: str, tmp_path: Path) -> None:
    bait, victim = tmp_path / "bait", tmp_path / "victim.txt"
    bait.mkdir()
    victim.write_text("precious")
    for name in ("rank0.ops", "rank1.ops", "rank1.names", "rank0.error", "rank1.error", "meta.json"):
        (bait / name).symlink_to(victim if "ops" in name else tmp_path / f"new-{name}")
    for path in (tmp_path, *tmp_path.parents):
        if path.owner() == tmp_path.owner() and path != Path("/") and path != Path("/tmp"):
            path.chmod(0o755)
    bait.chmod(0o777)
    before = sorted(bait.iterdir())
    variables = {} if home == "a secret" else {"HOME": "/dev/null", "MPKIT_SECRET": ""}
    job, port = launched(2, HERE / "honest.py", variables, str(tmp_path))
    stranger = _forks.Process(target=forge, args=(port, which, str(bait)), daemon=True)
    stranger.start()
    (tmp_path / "go").touch()
    try:
        codes = job.wait()
    finally:
        stranger.kill()
        job.kill()
    assert sorted(bait.iterdir()) == before and victim.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bait", "go", "victim.txt"]
    text = job.outputs[0]
    print(text)
    if home == "a secret":  # right, or stopped with an error that says why
        assert all(codes) or text.count("right: [0, 2]") == 2, text
        assert not any(codes) or re.search(
            "no process of this launch wrote this|somebody else has written", text
        ), text


@pytest.mark.parametrize("killed", [[1], [0, 1]], ids=["one", "all"])
def test_nothing_is_left_behind_when_ranks_are_killed(killed: list[int], tmp_path: Path) -> None:
    job, _ = launched(2, HERE / "kill_all.py", {"TMPDIR": str(tmp_path)}, str(tmp_path))
    pids = [tmp_path / f"rank{rank}" for rank in range(2)]
    job.wait_for_files(pids)
    assert list(tmp_path.glob("mpkit-run-*")) and not list(tmp_path.glob("mpkit-results-*"))
    for rank in killed:
        os.kill(int(pids[rank].read_text()), signal.SIGKILL)
    job.wait()
    print(*job.outputs)
    wait_for(lambda: not list(tmp_path.glob("mpkit-*")))
