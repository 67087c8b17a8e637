"""The common issues of a guide to training on several GPUs, each with the steps that lead to its cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

__all__ = ["SCALING", "TOPICS", "Topic", "find_topic"]

SCALING = {2: 0.95, 4: 0.88, 8: 0.81}
"""What the guide expects of data parallelism: throughput on n GPUs over n times that on one."""


@dataclass(frozen=True)
class Topic:
    """A common issue.

    Attributes:
        name: what users say.
        words: other words for it.
        means: what it means, and what would be good.
        steps: what to look at, in order: (what, the command).
    """

    name: str
    words: tuple[str, ...]
    means: str
    steps: tuple[tuple[str, str], ...]


_ALL = (
    Topic(
        "gpus not found",
        ("not found", "not detected", "no gpu", "cuda not available", "device_count 0"),
        "torch.cuda.device_count() is less than the GPUs that are in the machine.",
        (
            ("does the driver see them?", "nvidia-smi -L"),
            (
                "does a variable hide them?",
                "echo $CUDA_VISIBLE_DEVICES $ROCR_VISIBLE_DEVICES $ZE_AFFINITY_MASK",
            ),
            (
                "was torch built for them?",
                'python -c "import torch; print(torch.version.cuda, torch.cuda.device_count())"',
            ),
            ("is the machine a container?", "docker run --gpus all ...; SLURM: --gres=gpu:4"),
        ),
    ),
    Topic(
        "gpu 0 busier",
        ("unbalanced", "imbalance", "gpu 0", "uneven", "one gpu busier"),
        "GPU 0 at 100 % and the others at 60 %, or more memory on it: something is done by one rank for all.",
        (
            (
                "nn.DataParallel gathers outputs and losses on GPU 0",
                "mk.Plan.ddp(n) in place of mk.Plan.dp(n)",
            ),
            (
                "data is loaded too slowly for the others",
                "mk.Batches(..., num_workers=4); run.timeline().data_time",
            ),
            (
                "every rank opens GPU 0 (cuda:0 in the code)",
                "torch.cuda.set_device(local_rank); map_location=device",
            ),
            (
                "evaluation, logging or checkpoints on rank 0 alone",
                "model.eval(), no_grad(), a share per rank",
            ),
            ("stages are unequal", "mk.find_cut(...); mk.compare(run)  # idle time by cause"),
        ),
    ),
    Topic(
        "out of memory",
        ("oom", "memory", "cuda out of memory", "outofmemoryerror"),
        "A GPU's memory holds parameters, gradients, optimizer states, activations and buffers; a batch is per GPU.",
        (
            (
                "who has which part?",
                "run.timeline().peak_memory  # a rank that runs out ends with this picture",
            ),
            ("fewer samples at once", "mk.Plan.ddp(n, microbatches=4): activations / 4, same gradients"),
            ("recompute activations", "mk.Plan.ddp(n, recompute='full'): one forward more"),
            ("shard the states", "mk.Plan.zero(3, n): 16 bytes per parameter become 16 / n"),
            ("16 bits", "mk.Plan.ddp(n, precision='bf16')"),
            ("divide the model", "mk.Plan.gpipe(n, m), mk.Plan.tp(n)"),
            ("the allocator keeps pieces", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ),
    ),
    Topic(
        "slow scaling",
        ("slow", "scaling", "speedup", "speed-up", "efficiency", "slow training"),
        "Good is an efficiency of 95 % on 2 GPUs, 88 % on 4 and 81 % on 8 (1.9, 3.5 and 6.5 times as fast as one).",
        (
            ("measure it", "mk.scaling(model, data, [1, 2, 4], loss=..., optimizer=...)"),
            ("PCI Express: who talks over what?", "nvidia-smi topo -m"),
            ("the CPU: are its cores full?", "htop; fewer transforms, more workers"),
            ("loading data: does the step wait for it?", "run.timeline().data_time; torch.profiler"),
            ("communication: is it hidden by the backward?", "mk.compare(run)  # idle time by cause"),
            (
                "the network between machines",
                "iperf3 -s on one, iperf3 -c HOST on the other; NCCL_DEBUG=INFO",
            ),
            ("too little work per GPU", "a larger batch per GPU, or fewer GPUs"),
        ),
    ),
    Topic(
        "nccl time-outs",
        ("nccl", "timeout", "time-out", "hang", "nccl error", "nccl timeout", "watchdog"),
        "`Watchdog caught collective operation timeout`: some rank did not make the call that the others wait in.",
        (
            ("which rank, which line?", "run it on mpkit: a hang is reported with rank, call and line"),
            ("what did nccl choose?", "NCCL_DEBUG=INFO python ..."),
            ("the last calls of each rank", "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1"),
            ("is it the P2P of the cards?", "NCCL_P2P_DISABLE=1, for one run"),
            ("is it the wrong interface?", "NCCL_SOCKET_IFNAME=eth0"),
            ("is it InfiniBand?", "NCCL_IB_DISABLE=1, for one run; ulimit -l"),
            (
                "is one rank slow (compiling, saving, loading)?",
                "init_process_group(timeout=timedelta(minutes=60))",
            ),
        ),
    ),
    Topic(
        "variables",
        ("nccl variables", "environment", "env"),
        "The variables of nccl and around it: what each means, and when to set it.",
        (),
    ),
)

TOPICS: Mapping[str, Topic] = {topic.name: topic for topic in _ALL}
"""The topics by name."""


def find_topic(name: object) -> Topic:
    """Return the topic that a user means.

    >>> find_topic("OOM").name, find_topic("slow scalling").name
    ('out of memory', 'slow scaling')

    Raises:
        ValueError: there is none.
    """
    if not isinstance(name, str):
        raise ValueError(
            f"doctor({name!r}): a topic is one of {_list_topics()}, or leave it out for the whole report"
        )
    wanted = name.lower().strip().replace("_", " ")
    by_word = {word: topic for topic in _ALL for word in (topic.name, *topic.words)}
    near = wanted if wanted in by_word else next(iter(get_close_matches(wanted, by_word, 1, 0.75)), None)
    if near is None:
        raise ValueError(f"doctor({name!r}): there is no such topic; there are {_list_topics()}")
    return by_word[near]


def _list_topics() -> str:
    return ", ".join(repr(topic.name) for topic in _ALL)
