"""Plans: which strategies run on how many ranks, as data that can be checked, written and read.

In     what a user asks for: degrees, a schedule, micro-batches, ZeRO's stage, precision.
Out    a `Plan`, its `Mesh` and its pipeline `Schedule`; other frameworks' configurations of it (`formats`).
Begin with `plan.py`, then `mesh.py` and `schedule/schedules.py`.
May import  `common`, `trace`.
"""
