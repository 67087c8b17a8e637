"""TF_CONFIG, the environment variable of TensorFlow's MultiWorkerMirroredStrategy: one worker per GPU."""

from __future__ import annotations

from typing import Any

from mpkit.plan.formats.keys import Fields, Format, Values, context
from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.syntax import JSON
from mpkit.plan.formats.torchrun import RANKS_ONLY

__all__ = ["TF_CONFIG"]


def _workers(asked: ExportRequest) -> list[str]:
    """Return an address per rank: the nodes count up from the first one, and each GPU has a port."""
    name = asked.master.rstrip("0123456789")
    first = asked.master[len(name) :]
    hosts = [
        asked.master if asked.nodes == 1 else f"{name}{int(first or 0) + node}" for node in range(asked.nodes)
    ]
    return [f"{host}:{asked.port + gpu}" for host in hosts for gpu in range(asked.gpus_per_node)]


def _finish(values: Values, fields: Fields, notes: list[str]) -> Fields:
    workers: Any = values.get("cluster.worker", [])
    chief: Any = values.get("cluster.chief", [])
    if not isinstance(workers, list) or not isinstance(chief, list) or len(chief) > 1:
        raise ValueError(
            f"tf_config: worker and chief are lists of addresses, chief one at most: {workers!r:.60}, {chief!r:.60}. "
            'Such as {"cluster": {"worker": ["node0:29500", "node1:29500"]}, "task": {"type": "worker", "index": 0}}'
        )
    return fields | {"dp": max(1, len(workers) + len(chief))}


def _check(asked: ExportRequest) -> None:
    if asked.nodes > 1 and asked.master.replace(".", "").isdecimal():
        raise ValueError(
            f"plan.to('tf_config', master={asked.master!r}): the other nodes' names count up from the first one's, "
            "which an address does not: master='node0'"
        )


TF_CONFIG = Format(
    "tf_config",
    "TF_CONFIG",
    JSON,
    (
        context("cluster.worker", "address of each worker, one per GPU; the same on all", _workers),
        context("cluster.chief", "the worker that saves", lambda asked: None),
        context("task.type", "what this process is", lambda asked: "worker"),
        context("task.index", "which worker this process is: different on each, from 0", lambda asked: 0),
    ),
    _finish,
    RANKS_ONLY | {"dp": "MultiWorkerMirroredStrategy has replicas only: one per worker"},
    _check,
)
