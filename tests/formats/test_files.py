"""Texts as they are in public repositories, each in its shortest form."""

import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import mpkit as mk
from mpkit import Plan
from mpkit.plan.formats.frameworks import FORMATS
from tests.formats.plans import plans

AT_ONCE, SPEED = 2**20, 5e8 * 4 / 2**20
RUN = "torchrun --nproc-per-node 8 pretrain_gpt.py --micro-batch-size 1"
JOB = "#!/bin/bash\n#SBATCH --job-name=x\n"


def megatron(**fields: Any) -> Plan:
    """Return the plan of RUN with other fields."""
    return Plan(**{"dp": 8, "schedule": "1f1b", "bucket_mb": AT_ONCE} | fields)


SCRIPTS = {
    "an empty variable": ("LOG=\ntorchrun --nproc-per-node 4 train.py", Plan.ddp(4)),
    "a default in quotes": ('N=${N:-"4"}\ntorchrun --nproc-per-node $N train.py', Plan.ddp(4)),
    "a shell within": (f"srun bash -c '{RUN} --bf16'", megatron(precision="bf16")),
    "Accelerate's launcher": ("accelerate launch --num_processes 8 --mixed_precision bf16 train.py",
                              Plan.ddp(8, precision="bf16")),
    "a Trainer": ("torchrun --nproc_per_node=4 train.py --bf16 True --gradient_accumulation_steps 16 "
                  "--gradient_checkpointing True --fsdp 'full_shard auto_wrap offload' --per_device_train_batch_size 2",
                  Plan(dp=4, microbatches=16, recompute="full", zero=3, offload="params", precision="bf16")),
    "GPUs of a task": (f"{JOB}#SBATCH -N 2\n#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-task=1", Plan.ddp(8)),
    "what SLURM sets": (f"#SBATCH -N 2\nsrun torchrun --nnodes $SLURM_NNODES {RUN[9:]}", megatron(dp=16)),
    "older recomputation": (f"{RUN} --checkpoint-activations --model-parallel-size 2",
                            megatron(dp=4, tp=2, recompute="full")),
    "sharding in any order": (f"{RUN} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
                              "--use-distributed-optimizer", Plan(dp=8, schedule="1f1b", zero=3)),
}  # fmt: skip


@pytest.mark.parametrize("what", SCRIPTS)
def test_scripts(what: str) -> None:
    text, plan = SCRIPTS[what]
    assert Plan.read(text + "\n") == plan  # a warning would be an error


FILES = {
    "parameters, then optimizer": (
        '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, '
        '"offload_optimizer": {"device": "cpu"}}}',
        "deepspeed", Plan(zero=3, offload="params"),
    ),
    "DeepSpeed's buckets through Accelerate": (
        "distributed_type: DEEPSPEED\nnum_processes: 4\nmixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 1\n",
        "accelerate", Plan(dp=4, zero=1, precision="bf16", bucket_mb=SPEED / 2),
    ),
    "layers of a stage": (
        f"{RUN} --global-batch-size 16 --pipeline-model-parallel-size 4 --num-layers 32 "
        "--num-layers-per-virtual-pipeline-stage 2",
        "megatron", megatron(pp=4, dp=2, schedule="interleaved_1f1b", microbatches=8, virtual_stages=4),
    ),
    "settings without FSDP": ("gradient_checkpointing: true\nfsdp_config:\n  min_num_params: 0\n  version: 2\n",
                              "trainer", Plan(recompute="full")),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The text, read as")
@pytest.mark.parametrize("what", FILES)
def test_files(what: str) -> None:
    text, name, plan = FILES[what]
    assert Plan.read(text + "\n", name) == plan


DS = '"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2'
FSDP = "distributed_type: FSDP\nnum_processes: 8\n"

IN_FULL = [
    ("torchrun --nnodes 2 --nproc_per_node=8 \\\n  train.py", Plan.ddp(16)),
    ("#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --gres=gpu:a100:8\nsrun torchrun train.py", Plan.ddp(32)),
    ('{"zero_optimization": {"stage": 3}, "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4,\n'
     '"gradient_accumulation_steps": 2, "fp16": {"enabled": true}, "bf16": {"enabled": false}}',
     Plan.zero(3, 8, microbatches=2, precision="fp16", bucket_mb=SPEED / 2)),
    ("distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n",
     Plan.zero(2, 8)),
    ("per_device_train_batch_size: 4\nfsdp: full_shard auto_wrap\nbf16: true\n", Plan(zero=3, precision="bf16")),
    ("torchrun --nproc-per-node=8 \\\n pretrain_gpt.py --tensor-model-parallel-size 2 --sequence-parallel "
     "--pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 32",
     Plan(pp=2, dp=2, tp=2, schedule="1f1b", microbatches=8, sequence_parallel=True, bucket_mb=AT_ONCE)),
    ('{"cluster": {"worker": ["a:1", "b:1"], "chief": ["c:1"]},\n "task": {"type": "chief", "index": 0}}', Plan.ddp(3)),
    (f'{{{DS}, "zero_optimization": true}}', "deepspeed", Plan(dp=4, microbatches=2, zero=1, bucket_mb=SPEED)),
    (f'{{{DS}, "zero_optimization": {{"stage": 2, "cpu_offload": true}}}}', "deepspeed",
     Plan(dp=4, microbatches=2, zero=2, offload="optimizer", bucket_mb=SPEED)),
    (f'{{{DS}, "zero_optimization": {{"stage": 3, "cpu_offload_params": true, "mics_shard_size": -1}}}}',
     "deepspeed", Plan(dp=4, microbatches=2, zero=3, offload="params", bucket_mb=SPEED)),
    (f'{{{DS}, "bfloat16": {{"enabled": true}}, "fp16": {{}}, "sequence_parallel_size": 1}}', "deepspeed",
     Plan(dp=4, microbatches=2, precision="bf16", bucket_mb=SPEED / 2)),
    (f'{{{DS}, "tensor_parallel": {{"autotp_size": 0}}}}', "deepspeed",
     Plan(dp=4, microbatches=2, bucket_mb=SPEED)),
    (f"{FSDP}fsdp_config:\n  sharding_strategy: 2\nfp16: true\n", "accelerate",
     Plan(dp=8, zero=2, precision="fp16")),
    (f"{FSDP}fsdp_config:\n  fsdp_offload_params: 'yes'\n", "accelerate", Plan(dp=8, zero=3, offload="params")),
    (f"{FSDP}parallelism_config:\n  parallelism_config_sp_size: 2\n", "accelerate",
     Plan(dp=4, zero=3, cp=2, cp_method="ulysses")),
    ("distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {}\n", "accelerate",
     Plan(dp=4, zero=2, bucket_mb=SPEED)),
    (f"{RUN} --recompute-activations\n", "megatron",
     Plan(dp=8, schedule="1f1b", recompute="selective", bucket_mb=AT_ONCE)),
]  # fmt: skip


@pytest.mark.parametrize("said", IN_FULL, ids=str)
def test_files_of_which_nothing_is_left_out(said: tuple[Any, ...]) -> None:
    """Older keys, and what a file does not say, are read as the framework reads them."""
    *text_and_format, plan = said
    assert Plan.read(*text_and_format) == plan  # a warning would be an error


REJECTED = {
    "DeepSpeed's file": ("deepspeed --num_gpus 8 train.py --deepspeed zero3.json --bf16 True", "", "in that file"),
    "a file that decides": (f"{RUN} --deepspeed --deepspeed_config ds.json", "", "in that file"),
    "Megatron-DeepSpeed": (f"{RUN} --zero-stage 1", "", "it is Megatron-DeepSpeed's"),
    "parameters on the host, but not ZeRO-3": (
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  offload_param_device: cpu\n  zero_stage: 2\n", "",
        "gathered layer by layer, in stage 3",
    ),
    "layers per stage": (f"{RUN} --num-layers-per-virtual-pipeline-stage 2", "", "needs --num-layers, a multiple of"),
    "ranks that nothing says": (f"python {RUN[28:]} --tensor-model-parallel-size 2", "", r"Plan.read\(..., ranks=8\)"),
    "a branch": (f"if [ -f a ]; then\n A=--bf16\nfi\n{RUN}", "", "--bf16 = 'true, where a test or a loop decides"),
    "GPT-NeoX": ('{"train_micro_batch_size_per_gpu": 4, "model_parallel_size": 2}', "",
                 "model_parallel_size = 2 divides the work too"),
    "Axolotl's degree": ("gradient_checkpointing: true\nbf16: true\ntensor_parallel_size: 2", "",
                         "tensor_parallel_size = 2 divides"),
    "only what all have": ("batch_size: 4\nbf16: true\ngradient_accumulation_steps: 8", "",
                           "Other programs have bf16, gradient_accumulation_steps too.*format='trainer'"),
    "Axolotl's FSDP": ("bf16: true\nfsdp_version: 2\nfsdp_config:\n  offload_params: true\n", "", "it is Axolotl's"),
    "ms-swift": ("NPROC_PER_NODE=8 megatron sft --tensor_model_parallel_size 2", "", "defaults of its own"),
    "torchtitan's TOML of 2024": ("[training]\ntensor_parallel_degree = 2\n", "torchtitan", "no key of"),
    "other axes in branches": ("case $1 in\n a) A='--tensor-model-parallel-size 2 --bf16' ;;\n"
                               f" b) A='--pipeline-model-parallel-size 2 --bf16' ;;\nesac\n{RUN}", "",
                               "where a test or a loop decides"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*read as")
@pytest.mark.parametrize("what", REJECTED)
def test_what_is_another_plan_is_rejected(what: str, tmp_path: Path) -> None:
    text, name, says = REJECTED[what]
    path = tmp_path / (
        "file" + {"{": ".json"}.get(text[0], ".py" if name else ".yaml" if ": " in text else ".sh")
    )
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        Plan.read(path, name or None)


WRONG = [
    ('{"train_batch_size": 9, "train_micro_batch_size_per_gpu": 4}', None, "no multiple.*train_batch_size = 8"),
    ('{"zero_optimization": {"stage": 4}}', None, "zero_optimization.stage = 4: one of 0, 1, 2, 3"),
    ('{"gradient_accumulation_steps": 4}', None, "gradient_accumulation_steps too.*format='deepspeed'"),
    ('{"gradient_accumulation_steps": "four"}', "deepspeed", "a whole number, 1 or more"),
    ('{"learning_rate": 0.1}', None, "no key of a format that is known"),
    ('{"bf16": {"enabled": true}, "fp16": {"enabled": true}, "train_batch_size": 8,'
     ' "train_micro_batch_size_per_gpu": 8}', None, "both enabled"),
    ("{", "deepspeed", "cannot be read as deepspeed"),
    ("no_such_file.json", None, "no such file"),
    ("torchrun --nproc-per-node=auto \\\n t.py", None, "--nproc-per-node=auto: a whole number.*ranks=8"),
    ("distributed_type: TPU\nnum_processes: 8", None, "one of NO, MULTI_GPU"),
    (f'{{{DS}, "fp16": true}}', "deepspeed", r"fp16 = True: it holds settings, such as fp16\.enabled"),
    (f"{RUN} --bf16 --fp16\n", "megatron", "bf16 and fp16 are both enabled"),
    ("bf16: true\nfp16: true\n", "trainer", "bf16 and fp16 are both enabled"),
    ("deepspeed: ds.json\nbf16: true\n", "trainer", r"deepspeed = 'ds.json': the plan is in that file"),
    ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n", "accelerate",
     "deepspeed_config_file = 'ds.json': the plan is in that file"),
    (f"{RUN} --expert-tensor-parallel-size x\n", "megatron", "a whole number, 1 or more"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The text, read as")
@pytest.mark.parametrize(("text", "format", "says"), WRONG, ids=str)
def test_what_is_wrong_says_what_would_work(text: str, format: str | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Plan.read(text, format)


LEFT_OPEN = {
    "torchtitan": ("ParallelismConfig(data_parallel_shard_degree=-1, tensor_parallel_degree=2)",
                   Plan(dp=8, tp=2, sequence_parallel=True, zero=3, precision="bf16")),
    "DeepSpeed": ('{"zero_optimization": {"stage": 2}}', Plan(dp=16, zero=2, bucket_mb=SPEED)),
    "Accelerate": ("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2", Plan(dp=16, zero=3)),
    "the Trainer": ("output_dir: out\nfsdp: full_shard", Plan(dp=16, zero=3)),
    "Megatron": (f"torchrun --nproc-per-node $GPUS {RUN[28:]} --tensor-model-parallel-size 2",
                 megatron(dp=8, tp=2)),
    "torchrun": ("torchrun --nproc-per-node gpu train.py", Plan(dp=16)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The text, read as")
@pytest.mark.parametrize("what", LEFT_OPEN)
def test_ranks_that_a_file_leaves_open_are_said(what: str) -> None:
    text, plan = LEFT_OPEN[what]
    assert Plan.read(text + "\n", ranks=16) == plan
    assert " --" not in text or Plan.read(text, ranks=16) == plan, "a command may be one line"


@pytest.mark.parametrize(
    ("ranks", "says"),
    [(6, r"6 is not a multiple of 4: ranks=4"), ("16", r"1 or more: Plan.read\(..., ranks=8\)")],
)
def test_ranks_that_cannot_be(ranks: Any, says: str) -> None:
    degrees = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "data_parallel_shard_degree": -1}
    with pytest.raises(ValueError, match=says):
        Plan.read({"parallelism": degrees}, ranks=ranks)


NOTED = {
    "a default": ('{"zero_optimization": {"stage": 2}}', "read as dp=1"),
    "all that may divide": (
        "torchrun --nproc_per_node 8 t.py "
        + " ".join(f"--moe-{letter} 1" for letter in "abcdefghijklmnop")
        + " --z 1",
        "--moe-p and 1 more",
    ),
}


@pytest.mark.parametrize("what", NOTED)
def test_what_is_assumed_is_named(what: str) -> None:
    text, says = NOTED[what]
    with pytest.warns(UserWarning, match=says):
        Plan.read(text + "\n")


# ---- The Python that `plan.to("fsdp")` writes runs on real ranks, and trains as one process does.

STEPS, SAMPLES = 3, 8


class Blocks(nn.Module):
    """Blocks in a ModuleList, as models have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 2, generator=generator)


def serial() -> list[float]:
    model = Blocks()
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(ctx: Any, code: str) -> list[float]:
    """Train with `shard` and `step` of the code that was written."""
    written: dict[str, Any] = {}
    exec(code, written)
    model = Blocks()
    model = written["shard"](model, model.blocks)
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for step in range(STEPS):
        mine = [part.chunk(2)[ctx.rank] for part in batch(step)]
        losses.append(written["step"](model, optimizer, nn.functional.mse_loss, mine).item())
    return losses


@pytest.mark.parametrize(
    "plan",
    [Plan.zero(3, 2), Plan.zero(2, 2, microbatches=2), Plan.zero(3, 2, recompute="full", offload="params")],
    ids=str,
)
def test_the_code_trains_as_one_process(plan: Plan, clusters: Callable[..., mk.Cluster]) -> None:
    ranks = clusters(2).run(trained, str(plan.to("fsdp")))
    assert [sum(step) / 2 for step in zip(*ranks, strict=True)] == pytest.approx(serial(), rel=1e-5)


# ---- What a format says comes back; what it cannot say is listed; nothing is lost in silence.


def written(plan: Plan, name: str, **context: object):
    """Return the configuration of a plan, or None if the framework would refuse it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            return plan.to(name, **context)
        except ValueError as error:
            assert "Plan(" in str(error), "an error shows a plan that works"
            return None


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@given(plan=plans(), micro=st.integers(1, 8))
@settings(max_examples=25)
def test_plans_survive_each_format(name: str, plan: Plan, micro: int, tmp_path_factory) -> None:
    config = written(plan, name, micro_batch=micro)
    assume(config is not None)
    path = config.save(tmp_path_factory.mktemp("format") / "file")
    assert path.read_text() == config
    back = Plan.read(path)  # no warning: nothing that was written is unknown
    differ = {f.name for f in fields(Plan) if getattr(back, f.name) != getattr(plan, f.name)}
    assert differ == {*config.cannot_say}
    assert all(config.cannot_say.values())
    assert Plan.read(config) == Plan.read(path, format=name) == back
