"""Environment variables: ranks have those of the launch, and copies of a program do not each start ranks."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

import mpkit as mk


def test_ranks_have_the_environment_of_the_launch(
    clusters: Callable[[int], mk.Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what changed after the cluster was made; and an interface for gloo is the user's."""
    cluster = clusters(2)
    names = ("NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PYTHONPATH", "HOME")

    def look(ctx):  # type: ignore[no-untyped-def]
        return [os.environ.get(name) for name in names]

    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.delenv("HOME", raising=False)
    assert cluster.run(look) == [["INFO", "lo", "eth7", "/somewhere", None]] * 2
    monkeypatch.undo()
    found = cluster.run(look)[0]
    assert found[0] == os.environ.get("NCCL_DEBUG") and found[4] == os.environ.get("HOME")


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, r"RANK=1 and WORLD_SIZE=2 .* as torchrun sets"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, r"as srun sets them: 4 copies"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, r"start it once, with `python \S+\.py`"),
    ],
)
def test_copies_of_a_program_start_no_ranks(
    clusters: Callable[[int], mk.Cluster],
    variables: dict[str, str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would train a model of its own."""
    cluster = clusters(2)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=says):
        mk.Cluster(2, device="cpu")
    with pytest.raises(ValueError, match=says):
        cluster.run(lambda ctx: ctx.rank)


def test_a_rank_on_the_cpu_sees_no_gpu(
    clusters: Callable[[int], mk.Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 takes the accelerator that it sees, and a second rank found no second GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert clusters(2).run(lambda ctx: os.environ["CUDA_VISIBLE_DEVICES"]) == ["", ""]
