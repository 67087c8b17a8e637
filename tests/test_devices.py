"""Which rank gets which device: chosen from inventories of machines that are no real ones, and on CPUs for real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import mpkit as mk
from mpkit.devices.local import gpus as local
from mpkit.devices.local.choose import DeviceChoice, choose
from mpkit.devices.local.gpus import Gpu, Inventory, inventory_of_gpus, unnamed_devices, visible

A100 = [Gpu(i, "A100", f"GPU-{i}a5f", f"00000000:0{i}:00.0", 80 << 30, 0, compute=(8, 0)) for i in range(4)]
T4_AND_A100 = [replace(A100[0], name="T4", memory=15 << 30, compute=(7, 5)), A100[1], A100[2]]


def machine(gpus: list[Gpu], **environment: str) -> Callable[[str], Inventory | None]:
    """What `inventory_of` would be on a machine with these GPUs."""
    found = inventory_of_gpus(gpus, environment, len(visible(gpus, environment).gpus))
    found = replace(found, fake=f"{len(gpus)} GPUs of a test")
    return lambda kind: found if kind == "cuda" and found.devices else None


FOUR = machine(A100)


@pytest.mark.parametrize(
    ("devices", "ranks", "numbers", "count"),
    [
        ([2, 0], None, (2, 0), 2),
        (3, None, (3,), 1),
        ("cuda:1", None, (1,), 1),
        ("cuda:1", 3, (1,), 3),
        ("cuda:3, cuda:0", None, (3, 0), 2),
        ("2,0", None, (2, 0), 2),
        (["cuda:1", 2], None, (1, 2), 2),
        ("cuda", None, (0, 1, 2, 3), 4),
        ("gpu:1", None, (1,), 1),
        (range(4), 8, (0, 1, 2, 3), 8),
        ([torch.device("cuda", 1), torch.device("cuda:0")], None, (1, 0), 2),
        ([0, 0], None, (0, 0), 2),
    ],
)
def test_devices_as_people_write_them(
    devices: object, ranks: int | None, numbers: tuple[int, ...], count: int
) -> None:
    assert choose(devices, ranks, FOUR) == DeviceChoice("cuda", numbers, count)


@pytest.mark.parametrize(
    ("devices", "ranks", "words"),
    [
        (
            [4],
            None,
            r"names cuda:4, and torch sees 4: cuda:0 to cuda:3 \(no variable is set.*such as devices=\[0, 1\]",
        ),
        ([-1], None, "-1 is no device"),
        ([True], None, "True is no device"),
        ([1.0], None, "1.0 is no device"),
        ("cuba:0", None, "did you mean 'cuda'"),
        ("cuda:x", None, "'cuda:x' is no device"),
        ([], None, "names no device"),
        ("", None, "names no device"),
        (["cuda:0", "cpu"], None, "mixes cuda and cpu"),
        ([0, 1, 2], 2, "names 3 devices for ranks=2"),
        ("xpu:0", None, "torch sees no xpu device here, it sees cuda"),
        ("mps", None, "torch sees no mps device"),
    ],
)
def test_devices_that_cannot_be(devices: object, ranks: int | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose(devices, ranks, FOUR)


@pytest.mark.parametrize(
    ("kind", "environment", "decided"),
    [
        ("xpu", {"ZE_AFFINITY_MASK": "0"}, "ZE_AFFINITY_MASK=0"),
        ("cuda", {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, "HIP_VISIBLE_DEVICES=0, ROCR_"),
        ("hpu", {"CUDA_VISIBLE_DEVICES": "0"}, "no variable is set"),
    ],
)  # fmt: skip
def test_other_accelerators_name_their_variables(
    kind: str, environment: dict[str, str], decided: str
) -> None:
    assert unnamed_devices(kind, 2, environment).decided_by.startswith(decided)


# ---------------------------------------------------------------- clusters


def test_a_cluster_on_gpus_prints_who_is_where_and_which_variable_decided(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "inventory_of", machine(T4_AND_A100, CUDA_VISIBLE_DEVICES="1,0"))
    with mk.Cluster(devices=[1, 0]) as cluster:
        assert (cluster.ranks, cluster.device, cluster.devices, cluster.backend) == (2, "cuda", 2, "nccl")
        first, head, *rows = str(cluster).splitlines()
        assert first == "Cluster(ranks=2, device='cuda')  # nccl"
        assert head.split() == ["rank", "device", "name", "UUID", "or", "bus", "id", "memory"]
        # CUDA counts A100, A100, T4; of these the second and the first are visible.
        assert [row.split() for row in rows[:2]] == [
            ["0", "cuda:1", "A100", "GPU-1a5f", "80.0", "GiB"],
            ["1", "cuda:0", "A100", "GPU-2a5f", "80.0", "GiB"],
        ]
        assert rows[2:4] == ["no real machine: 3 GPUs of a test", "decided by: CUDA_VISIBLE_DEVICES=1,0"]
        assert "CUDA_DEVICE_ORDER is not set" in capsys.readouterr().out
        assert cluster._repr_html_().count("<tr>") == 3
        shared = cluster.resized(3)
        assert shared.backend == "gloo"  # ranks 0 and 2 share cuda:1
        assert [row.split()[1] for row in str(shared).splitlines()[2:5]] == ["cuda:1", "cuda:0", "cuda:1"]
