"""What a dry run is compared with: the trace of a real run of the same.

communication, actions    what a rank asked for, and what it did
check_same                both are the same
"""

import json
from typing import Any

import numpy as np

import mpkit as mk
from mpkit.trace import Kind, RankTrace

MODEL_STATES = ("params", "grads", "optimizer")


def communication(rank: RankTrace) -> list[tuple[Any, ...]]:
    """What a rank asked for: kind, group, number, root, payload."""
    ops = rank.ops[(rank.ops["kind"] >= 32) & (rank.ops["kind"] < 64)]
    columns = ("kind", "number", "peer", "bytes", "step")
    return [(rank.name(op["group"]), *(op[column] for column in columns)) for op in ops]


def actions(rank: RankTrace) -> np.ndarray:
    ops = rank.ops
    return ops[(ops["kind"] < 16) & (ops["depth"] == 0)]


def check_same(real: mk.Trace, fake: mk.Trace) -> None:
    assert fake.world_size == real.world_size
    peaks = [mk.Timeline.of(trace).peak_memory for trace in (real, fake)]
    comm = [mk.Timeline.of(trace).comm_bytes for trace in (real, fake)]
    assert comm[0] == comm[1]
    for rank in range(real.world_size):
        mine, played = real.ranks[rank], fake.ranks[rank]
        assert communication(played) == communication(mine), rank
        for key in MODEL_STATES:
            held, would = peaks[0][rank][key], peaks[1][rank][key]
            # A rank that another one stands for may hold less under ZeRO: its shards end in padding.
            slack = (
                0 if rank in fake.meta["fake"]["played"] or not json.loads(fake.meta["plan"])["zero"] else 64
            )
            assert held <= would <= held + slack, (rank, key, held, would)
        done, counted = actions(mine), actions(played)
        assert counted["kind"].tolist() == done["kind"].tolist()
        computed = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
        counts = np.isin(done["kind"], computed)
        # Of a shared sequence the real trace has the FLOPs of the first part's rank, the fake one each rank's own.
        counts &= json.loads(fake.meta["plan"])["cp"] == 1
        assert counted["flops"][counts].tolist() == done["flops"][counts].tolist()
