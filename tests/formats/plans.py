"""Random plans."""

from typing import Any

from hypothesis import strategies as st

from mpkit import Plan, Schedule
from mpkit.plan.schedule import NAMES
from mpkit.plan.schedule.catalogue import ANY, SCHEDULES

OWN = Schedule(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], name="mine")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw a plan: each field by itself, as far as they work together."""
    degree = st.sampled_from([1, 1, 2, 3, 4])
    said: dict[str, Any] = {name: draw(degree) for name in ("pp", "dp", "tp", "cp")}
    said["microbatches"] = draw(st.integers(1, 8))
    schedule = draw(st.sampled_from(NAMES))
    said["schedule"] = schedule
    if SCHEDULES[schedule].per_rank == ANY:
        said["virtual_stages"] = draw(st.integers(1, 3))
    said["zero"] = draw(st.integers(0, 3))
    said["offload"] = draw(st.sampled_from(["none", "optimizer", *(["params"] if said["zero"] == 3 else [])]))
    said["precision"] = draw(st.sampled_from(["full", "bf16", "fp16"]))
    said["recompute"] = draw(st.sampled_from(["none", "selective", "full", "every=2"]))
    said["bucket_mb"] = draw(st.sampled_from([25, 1, 0.1, 12.5, 100]))
    said["unused"] = draw(st.sampled_from(["error", "allow"]))
    said["batchnorm"] = draw(st.sampled_from(["sync", "local"]))
    said["prefetch"] = draw(st.integers(0, 2))
    said["cp_order"] = draw(st.sampled_from(["contiguous", "zigzag"]))
    said["cp_method"] = draw(
        st.sampled_from(["ring", "ulysses"] if said["cp_order"] == "contiguous" else ["ring"])
    )
    said["sequence_parallel"] = said["tp"] > 1 and draw(st.booleans())
    if draw(st.integers(0, 9)) == 0:
        said |= {"pp": 2, "schedule": OWN, "microbatches": 2, "virtual_stages": 1}
    if draw(st.integers(0, 9)) == 0:
        said |= {"pp": 1, "tp": 1, "cp": 1, "zero": 0, "offload": "none", "data_parallel": "dp", "schedule": "gpipe",
                 "virtual_stages": 1, "sequence_parallel": False, "cp_method": "ring"}  # fmt: skip
    else:
        replicas = said["dp"] * said["cp"]
        said["ep"] = draw(st.sampled_from([n for n in range(1, replicas + 1) if replicas % n == 0]))
    return Plan(**said)
