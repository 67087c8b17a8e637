"""A Trace: what each rank of a run did, in program order.

A rank writes three files into the run's folder while it runs, and whoever wants to look reads them while
they grow. They are memory-mapped, so a rank killed by SIGKILL loses nothing that it recorded.

    rank3.ops     a HEADER, then one OP record an operation, in the order in which they began
    rank3.mem     a HEADER, then one MEMORY record a change of the bytes held
    rank3.names   one JSON string a line; the records name things by line number
    meta.json     about the run: world size, device, plan, ...

An op that has begun and not ended has `end == 0`. That is what a hang or a crash is read from.

This module meets both sides, the ranks that record and the views that draw, and so imports nothing of mpkit
but its exceptions.
"""

from mpkit.trace.files import RankTrace, read_rank
from mpkit.trace.records import CATEGORIES, HEADER, MAGIC, MEMORY, OP, Kind, Lane, lane_of
from mpkit.trace.trace import Trace

__all__ = [
    "CATEGORIES",
    "HEADER",
    "MAGIC",
    "MEMORY",
    "OP",
    "Kind",
    "Lane",
    "RankTrace",
    "Trace",
    "lane_of",
    "read_rank",
]
