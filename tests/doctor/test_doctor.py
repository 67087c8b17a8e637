"""The doctor on this machine, whatever it is, as a user would ask it."""

import json
import subprocess
import sys
from typing import Any

import pytest

import mpkit as mk
from mpkit.launch.doctor.probe import ask_nvml
from mpkit.launch.doctor.report import CheckupReport
from tests.doctor.stored import CASES, costs, report, torch_of
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


@pytest.mark.slow
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
        "may open 300 files", "did you mean NCCL_SOCKET_IFNAME?", "this machine has", "does not take 'NVLINK'",
    ):  # fmt: skip
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
    assert str(CheckupReport(())) == plain != ""
    assert shown == []


# ---- What the doctor says of stored machines: what costs, the evidence, and what fixes it.


@pytest.mark.parametrize("case", CASES)
def test_every_finding_has_evidence_and_those_that_cost_say_what_mends_them(case: str) -> None:
    found = report(case)
    assert found.findings
    for finding in found.findings:
        assert finding.what and finding.evidence, finding
        if finding.level == "costs":
            assert finding.costs and finding.fix, finding
    assert len(json.loads(found.to_json())["findings"]) == len(found.findings)


@pytest.mark.parametrize("case", ["8x-a100-nvswitch", "8x-h100-nvswitch"])
def test_nothing_costs_on_a_machine_with_nvswitch(case: str) -> None:
    found = report(case)
    assert costs(found) == []
    assert found.ok
    assert "Every pair of GPUs has NVLink" in str(found)


def test_four_4090_talk_through_the_cpu_without_p2p_and_one_is_in_use() -> None:
    said = costs(report("4x-rtx-4090"))
    assert [each.partition(":")[0] for each in said] == ["GPUs", "links", "links"]
    assert "GPU 0 is in use: of its memory 15.0 of 24.0 GiB" in said[0]
    assert "No NVLink: the GPUs talk over PCI Express, through the CPU (SYS at worst)" in said[1]
    assert "6 pairs of GPUs cannot read each other's memory (P2P): the GPU does not support it" in said[2]


def test_a_dgx_1_has_nvlink_between_some_and_a_group_of_four_is_named() -> None:
    found = report("dgx-1-v100")
    link = next(finding for finding in found.findings if finding.subject == "links")
    assert link.level == "note"
    assert "GPU 0 and 5 talk over SYS" in link.what
    assert "devices=[0, 1, 2, 3]" in link.fix


@pytest.mark.parametrize(("build", "words"), [
    (torch_of(0), "torch sees 0 of the 8 GPUs.*is a build without CUDA"),
    (torch_of(1) | {"gpus": 0, "error": "The NVIDIA driver on your system is too old"}, "too old"),
    (torch_of(5), "torch sees 5 of the 8 GPUs"),
])  # fmt: skip
def test_gpus_that_torch_does_not_see(build: dict[str, Any], words: str) -> None:
    import re

    found = report("8x-a100-nvswitch", "gpus not found", torch=build)
    assert any(re.search(words, each) for each in costs(found)), costs(found)
    assert "nvidia-smi -L" in str(found)


@pytest.mark.parametrize(("visible", "seen", "words"), [
    ("0,2", 2, None),
    ("", 0, None),
    ("0,9,1", 1, "names 9, which is no GPU here .there are 0 to 7.: CUDA drops it and all behind it"),
    ("0,0", 0, "names a GPU twice"),
    ("gpu1", 0, "neither an index nor a UUID"),
])  # fmt: skip
def test_visible_devices(visible: str, seen: int, words: str | None) -> None:
    import re

    build = torch_of(8) | {"gpus": seen}
    found = report("8x-a100-nvswitch", environment={"CUDA_VISIBLE_DEVICES": visible}, torch=build)
    assert any(f"see {seen} of 8 GPUs" in finding.what for finding in found.findings)
    assert found.ok == (words is None)
    assert words is None or any(re.search(words, each) for each in costs(found))


@pytest.mark.parametrize(("variable", "value", "level", "words"), [
    ("NCCL_P2P_DISABLE", "1", "costs", "do not read each other's memory"),
    ("NCCL_P2P_DISABLE", "yes", "costs", "does not take 'yes': 0, 1"),
    ("NCCL_IB_DISABLE", "0", "note", "InfiniBand"),
    ("NCCL_DEBUG", "verbose", "costs", "VERSION, WARN, INFO, TRACE"),
    ("NCCL_SOCKET_IFNAME", "=eth", "costs", "this machine has lo, eth0, ib0"),
    ("NCCL_SOCKET_IFNAME", "^docker", "note", ""),
    ("NCCL_SOKET_IFNAME", "eth0", "costs", "did you mean NCCL_SOCKET_IFNAME?"),
    ("NCCL_BLOCKING_WAIT", "1", "costs", "TORCH_NCCL_BLOCKING_WAIT since torch 2.2"),
    ("NCCL_OF_MY_OWN_PLUGIN", "1", "note", "no table here knows it"),
    ("CUDA_LAUNCH_BLOCKING", "1", "costs", "every kernel is waited for"),
])  # fmt: skip
def test_variables(variable: str, value: str, level: str, words: str) -> None:
    found = report("8x-a100-nvswitch", environment={variable: value})
    [about] = [finding for finding in found.findings if finding.subject == "variables"]
    assert about.level == level, about
    assert f"{variable}={value}" in about.evidence
    assert words in about.what


@pytest.mark.parametrize(("process", "words"), [
    ({"limits": {"nofile": (256, 4096), "memlock": (-1, -1)}}, "limits: This process may open 256 files"),
    (
        {"limits": {"nofile": (65536, 65536), "memlock": (65536, 65536)}},
        "limits: This process may lock 64 KiB",
    ),
    ({"shm": (64 << 20, 60 << 20)}, "Shared memory is small: 60 MiB free (64 MiB is Docker's default)"),
    ({"cpus": 8}, "CPUs: 8 CPUs for 8 GPUs: less than two for each"),
])  # fmt: skip
def test_a_narrow_process(process: dict[str, Any], words: str) -> None:
    assert any(words in each for each in costs(report("8x-a100-nvswitch", **process)))


@pytest.mark.parametrize(("why", "what", "fix"), [
    ("NVML answers Driver Not Loaded", "The NVIDIA driver does not answer", "modprobe"),
    ("NVML: No devices were found", "finds no GPU", "lspci"),
    ("NVML did not answer within 10 s", "driver hangs", "xid"),
])  # fmt: skip
def test_a_driver_that_fails_is_an_error(why: str, what: str, fix: str) -> None:
    found = report(None, nvml={"why": why, "failed": True})
    assert not found.ok
    (said,) = [finding for finding in found.findings if finding.subject == "GPUs"]
    assert said.level == "costs" and what in said.what and fix in said.fix
