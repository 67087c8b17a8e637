"""The doctor on this machine, whatever it is, as a user would ask it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

import mpkit as mk
from mpkit.launch.doctor.measure import measure
from mpkit.launch.doctor.probe import ask_nvml
from mpkit.launch.doctor.report import CheckupReport
from tests.limits import EVENT, PROGRAM


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_this_machine(quick: bool) -> None:
    found = mk.doctor(quick=quick)
    assert {each.subject for each in found.findings} >= {"GPUs", "memory", "CPUs", "limits", "measured"}
    assert str(found).splitlines()[-1].endswith(" s).")
    if not quick:
        [link] = [each for each in found.findings if "link between ranks" in each.what]
        assert "GB/s" in link.evidence
    assert "left out (quick)" in str(found) or not quick


@pytest.mark.soak
def test_two_ranks_measure_their_link_and_a_dataset(cluster: mk.Cluster) -> None:
    class Slow(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 10_000

        def __getitem__(self, index: int) -> Any:
            time.sleep(0.001)
            return torch.zeros(8), index

    found = measure(cluster.resized(2), Slow())
    assert (found.ranks, found.backend) == (2, "gloo")
    assert found.latency > 0 and found.bandwidth > 0 and found.all_reduce > 0
    assert found.loading is not None
    assert (found.loading.what, found.loading.nbytes, found.loading.own) == ("Slow", 8 * 4 + 8, True)
    assert 0 < found.loading.rates[0] <= 1000  # a sample takes a millisecond at least


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"topic": "slow scalling"}, None),
        ({"topic": "haircut"}, "'haircut'.*there is no such topic; there are 'gpus not found'"),
        ({"topic": 3}, "a topic is one of"),
        ({"data": iter([1])}, r"loader\.dataset"),
        ({"fast": True}, "quick=True"),
    ],
)
def test_mistyped(asked: dict[str, Any], words: str | None) -> None:
    if words is None:
        assert mk.doctor(**asked, quick=True).topic is not None
        return
    with pytest.raises(ValueError, match=words):
        mk.doctor(**asked)


def test_levels_are_named() -> None:
    found = mk.doctor(quick=True)
    assert sum(len(found.of(level)) for level in ("costs", "note", "fine", "not checked")) == len(
        found.findings
    )
    with pytest.raises(ValueError, match="the levels are 'costs', 'note'"):
        found.of("bad")


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        ["bash", "-c", command.replace("mpkit", f"{sys.executable} -m mpkit", 1)],
        capture_output=True, text=True, timeout=PROGRAM, env={**os.environ, **environment},
    )  # fmt: skip


def test_the_command_in_a_broken_environment_says_all_that_is_wrong_and_exits_with_1() -> None:
    """Few files, variables that are mistyped, have an odd value, or name an interface that is not there."""
    done = shell(
        "ulimit -n 300; mpkit doctor --quick --json",
        NCCL_SOKET_IFNAME="eth0", GLOO_SOCKET_IFNAME="nosuch9", NCCL_P2P_LEVEL="NVLINK",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert not found["ok"]
    said = " ".join(each["what"] for each in found["findings"] if each["level"] == "costs")
    for words in (
        "may open 300 files",
        "did you mean NCCL_SOCKET_IFNAME?",
        "this machine has",
        "does not take 'NVLINK'",
    ):
        assert words in said


def test_the_command_refuses_a_topic_that_there_is_not() -> None:
    done = shell("mpkit doctor haircut")
    assert done.returncode == 2
    assert "there is no such topic" in done.stderr


def test_nvml_is_asked_with_a_limit() -> None:
    """In a process of its own, which ends with all that it has started."""
    stays = ("sh", "-c", f"sleep {PROGRAM} & sleep {PROGRAM}")
    assert ask_nvml(0.2, stays) == {"why": "NVML did not answer within 0.2 s", "failed": True}
    assert (
        "failed: the driver is broken"
        in ask_nvml(EVENT, ("sh", "-c", "echo the driver is broken >&2; exit 3"))["why"]
    )
    assert "why" in ask_nvml() or ask_nvml()["gpus"]


def test_a_notebook_shows_the_report_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich's consoles show what they print in the notebook, whatever file they were given."""
    plain = str(CheckupReport(()))
    shown: list[object] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *parts: shown.append(parts))
    bundle = CheckupReport(())._repr_mimebundle_()
    assert bundle["text/plain"] == plain != ""
    assert shown == []
