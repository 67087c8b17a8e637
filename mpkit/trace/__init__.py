"""A Trace: what each rank of a run did, in program order.

In     the operations of a rank as they begin and end, bytes held, values and samples (`record`).
Out    `Trace` and `RankTrace`, which views, figures and predictions read.
Begin  with `records.py` (what is written), then `trace.py`.
May import  `common`.

A rank writes these files into the run's folder while it runs, and they can be read while they grow. They are
memory-mapped, so a rank that is killed by SIGKILL loses nothing that it recorded.

    rank3.ops     a HEADER, then one OP record per operation, in the order in which they began
    rank3.mem     a HEADER, then one MEMORY record per change of the bytes held
    rank3.names   one JSON string per line; the records refer to names by line number
    rank3.axes    of a watched program: the names that its DeviceMesh gave to groups, JSON
    rank3.log     a HEADER, then one VALUE record per logged value; only if the rank logged any
    rank3.sent    a HEADER, then one SENT_PART record per part of an uneven all-to-all; only if there was any
    rank3.gpu     a HEADER, then one SAMPLE record per sample of its GPU; written by the process that watches the run
    meta.json     about the run: world size, device, plan, ...

When a rank ends, the headers get a check of the records and names (CRC-32), so that later damage shows.

An op that has begun and not ended has `end == 0`, which shows where a hang or a crash happened.

Both the ranks that record and the views that draw import this package, so it imports nothing from mpkit but its
exceptions and `common`.
"""

from mpkit.trace.files import RankTrace, read_rank
from mpkit.trace.records import (
    CATEGORIES,
    HEADER,
    MAGIC,
    MEMORY,
    OP,
    SAMPLE,
    SENT_PART,
    TIMED_BY_EVENTS,
    VALUE,
    Kind,
    Lane,
    lane_of,
)
from mpkit.trace.trace import Trace

__all__ = [
    "CATEGORIES", "HEADER", "MAGIC", "MEMORY", "OP", "SAMPLE", "SENT_PART", "TIMED_BY_EVENTS", "VALUE", "Kind", "Lane",
    "RankTrace", "Trace", "lane_of", "read_rank",
]  # fmt: skip
