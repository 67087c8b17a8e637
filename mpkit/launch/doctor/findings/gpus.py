"""The GPUs: whether there are any, whether torch sees them, whether they are alike, and whether somebody uses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mpkit.common.units import memory_share, memory_text
from mpkit.devices.local.visibility import visible
from mpkit.launch.doctor.findings.finding import CheckupFinding, Level, plural
from mpkit.launch.doctor.parsers.facts import Facts, Unknown

__all__ = ["gpus"]

HIDDEN = ("gpus not found",)
USED = 0.1
"""The share of a GPU's memory in use by others from which on it is worth a finding."""


FAILURES = {
    "No devices were found": (
        "The NVIDIA driver is loaded and finds no GPU.",
        "lspci | grep -i nvidia  # nothing: the card is not in this machine, or not given to this container "
        "(docker run --gpus all)",
    ),
    "did not answer": (
        "nvidia-smi hangs, as it does where a GPU has fallen off the bus.",
        "sudo dmesg | grep -i -E 'xid|nvrm'  # which GPU, and why; then reboot",
    ),
    "": (
        "The NVIDIA driver does not answer, so no program can use a GPU.",
        "sudo modprobe nvidia && nvidia-smi  # if that fails, install the driver again, for this kernel (uname -r)",
    ),
}
"""What a failing nvidia-smi says, with the finding and the fix; "" for anything else."""


def gpus(facts: Facts) -> Iterator[CheckupFinding]:
    """Yield what there is to say about the GPUs."""
    if isinstance(facts.gpus, Unknown) and facts.gpus.failed:
        what, fix = next(found for said, found in FAILURES.items() if said in facts.gpus.why)
        slow = "programs run on CPUs, some 100 times slower than a GPU"
        yield CheckupFinding("GPUs", Level.COSTS, what, facts.gpus.why, slow, fix, HIDDEN)
        return
    if isinstance(facts.gpus, Unknown) and facts.torch.gpus == 0:
        yield CheckupFinding(
            "GPUs",
            Level.NOTE,
            "There is no GPU that the driver or torch knows of: ranks are CPU processes here, over gloo.",
            f"{facts.gpus.why}; torch.cuda.device_count() is 0",
            fix="nothing needs fixing: every strategy runs on CPU processes, mk.Cluster(ranks=4). If there should be "
            "a GPU: mpkit doctor 'gpus not found'",
            topics=HIDDEN,
        )
        return
    if isinstance(facts.gpus, Unknown):
        many = plural(facts.torch.gpus, "GPU")
        yield CheckupFinding(
            "GPUs",
            Level.UNCHECKED,
            f"torch sees {many}; their names and memory are not known.",
            facts.gpus.why,
        )
        return
    names = Counter(gpu.name for gpu in facts.gpus)
    listed = ", ".join(f"{count} x {name}" for name, count in names.items())
    seen = visible(facts.gpus, facts.environment)
    if facts.torch.gpus < len(seen.gpus):
        yield _explain_unseen(facts, listed, len(seen.gpus))
    elif len(seen.gpus) < len(facts.gpus):
        yield CheckupFinding(
            "GPUs",
            Level.NOTE,
            f"{seen.decided_by} lets programs see {len(seen.gpus)} of {plural(len(facts.gpus), 'GPU')}.",
            f"nvidia-smi lists {listed}",
            fix="unset CUDA_VISIBLE_DEVICES  # to see all",
            topics=HIDDEN,
        )
    else:
        yield CheckupFinding(
            "GPUs", Level.FINE, f"{listed}.", "nvidia-smi; torch sees as many", topics=HIDDEN
        )
    yield from (
        CheckupFinding("GPUs", Level.COSTS, note, seen.decided_by, _COST_HIDDEN, seen.fix)
        for note in seen.wrong
    )
    yield from _check_alike(facts)
    yield from _check_used_memory(facts)


_COST_HIDDEN = "other GPUs than those meant, or fewer, compute"


def _explain_unseen(facts: Facts, listed: str, there: int) -> CheckupFinding:
    build = facts.torch
    why, fix = "", "nvidia-smi -L; python -c 'import torch; print(torch.version.cuda)'"
    if not build.cuda and not build.hip:
        why = f": torch {build.version} is a build without CUDA"
        fix = "pip uninstall torch, then the command for your CUDA from pytorch.org (Get Started)"
    elif build.error:
        why = f": {build.error}"
    return CheckupFinding(
        "GPUs",
        Level.COSTS,
        f"torch sees {build.gpus} of the {plural(there, 'GPU')} that nvidia-smi lists{why}.",
        f"nvidia-smi: {listed}; torch.cuda.device_count(): {build.gpus}",
        "programs run on CPUs, some 100 times slower than a GPU",
        fix,
        HIDDEN,
    )


def _check_alike(facts: Facts) -> Iterator[CheckupFinding]:
    for gpu in facts.gpu_list:
        if not gpu.memory:
            yield CheckupFinding(
                "GPUs",
                Level.COSTS,
                f"GPU {gpu.index} does not answer the driver.",
                f"nvidia-smi knows its bus, {gpu.bus_id}, and not its memory; its name is {gpu.name!r}",
                "programs that use it fail or hang",
                f"sudo dmesg | grep -i -E 'xid|nvrm'; leave it out until it is repaired: "
                f"mk.Cluster(devices={[each.index for each in facts.gpu_list if each.memory]})",
                HIDDEN,
            )
    gpus = [gpu for gpu in facts.gpu_list if gpu.memory]
    if len({gpu.name for gpu in gpus}) > 1:
        smallest = min(gpus, key=lambda gpu: gpu.memory)
        lost = sum(gpu.memory - smallest.memory for gpu in gpus)
        yield CheckupFinding(
            "GPUs",
            Level.COSTS,
            f"The GPUs are not alike: {', '.join(dict.fromkeys(gpu.name for gpu in gpus))}.",
            "; ".join(f"GPU {gpu.index}: {gpu.name}, {memory_text(gpu.memory)}" for gpu in gpus),
            "data-parallel ranks go at the pace of the slowest GPU, and none can hold more than the smallest does: "
            f"{memory_text(lost)} stay unused",
            f"use those that are alike: mk.Cluster(devices={_largest_kind(facts)}); or give the faster ones longer "
            "pipeline stages: mk.devices.Hardware('mixed', devices=[...], link=...) predicts it",
            ("gpu 0 busier", "slow scaling"),
        )
        if "CUDA_DEVICE_ORDER" not in facts.environment:
            yield CheckupFinding(
                "GPUs",
                Level.NOTE,
                "CUDA counts unlike GPUs from the fastest on, nvidia-smi by their place on the PCI bus.",
                "CUDA_DEVICE_ORDER is not set",
                "cuda:0 may be another GPU than nvidia-smi's GPU 0",
                "export CUDA_DEVICE_ORDER=PCI_BUS_ID  # before Python starts",
            )
    elif len(gpus) > 1:
        yield CheckupFinding("GPUs", Level.FINE, "The GPUs are alike.", f"{len(gpus)} x {gpus[0].name}")


def _largest_kind(facts: Facts) -> list[int]:
    """Return the numbers, as torch counts, of the GPUs of the most frequent name."""
    seen = visible(facts.gpu_list, facts.environment).gpus or facts.gpu_list
    [(name, _)] = Counter(gpu.name for gpu in seen).most_common(1)
    return [place for place, gpu in enumerate(seen) if gpu.name == name]


def _check_used_memory(facts: Facts) -> Iterator[CheckupFinding]:
    for gpu in facts.gpu_list:
        if gpu.memory and gpu.used > USED * gpu.memory:
            busy = f", busy {gpu.busy} % of the time" if gpu.busy else ""
            yield CheckupFinding(
                "GPUs",
                Level.COSTS,
                f"GPU {gpu.index} is in use: of its memory {memory_share(gpu.used, gpu.memory)} are taken.",
                f"nvidia-smi: {gpu.used >> 20} MiB used{busy}",
                "a rank there has that much less memory, and waits for the other program's kernels",
                "nvidia-smi --query-compute-apps=pid,used_memory,process_name --format=csv  # whose is it?",
                ("out of memory", "gpu 0 busier"),
            )
