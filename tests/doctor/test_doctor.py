"""The doctor on this machine, whatever it is, as a user would ask it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import mpkit as mk
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
