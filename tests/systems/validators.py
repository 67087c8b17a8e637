"""The frameworks' own checks of their configurations, on a machine without GPUs.

Each takes the text that `plan.to` wrote, and the plan, and raises what the framework raises. Where a framework has no
check that runs here, `MISSING` says so.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from mpkit import Plan

MISSING = {"slurm": "sbatch --test-only needs a cluster; bash reads the script"}


def words_of(text: str, name: str) -> list[str]:
    """Return the arguments with which a script calls a command, as bash expands them."""
    script = f'{name}() {{ printf "%s\\0" "$@"; }}\n{text}'
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def _torchrun(text: str, plan: Plan) -> None:
    from torch.distributed.run import config_from_args, get_args_parser

    asked = get_args_parser().parse_args(words_of(text, "torchrun"))
    config, _, _ = config_from_args(asked)
    assert config.max_nodes * config.nproc_per_node == plan.ranks


def _slurm(text: str, plan: Plan) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, capture_output=True)


def _deepspeed(text: str, plan: Plan) -> None:
    import deepspeed.comm
    import torch.distributed as dist
    from deepspeed.runtime.config import DeepSpeedConfig

    class Ranks:
        """Stands for the ranks that are not here: DeepSpeed asks how many replicas there are."""

        def get_data_parallel_world_size(self) -> int:
            return plan.dp

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # it asks for its rank
    deepspeed.comm.init_distributed("gloo", verbose=False)
    config = DeepSpeedConfig(json.loads(text), mpu=Ranks())
    dist.destroy_process_group()
    assert config.train_batch_size == config.train_micro_batch_size_per_gpu * plan.microbatches * plan.dp


def _accelerate(text: str, plan: Plan) -> None:
    import yaml
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.utils import ParallelismConfig
    from accelerate.utils.dataclasses import DeepSpeedPlugin, FullyShardedDataParallelPlugin, MegatronLMPlugin

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text)
        assert ClusterConfig.from_yaml_file(path).num_processes == plan.ranks
    values = yaml.safe_load(text)
    if parallel := values.get("parallelism_config"):
        sizes = {name.removeprefix("parallelism_config_"): size for name, size in parallel.items()}
        assert ParallelismConfig(**sizes).total_size == plan.ranks
    plugins = {
        "fsdp": (
            FullyShardedDataParallelPlugin,
            {"version": "fsdp_version", "offload_params": "cpu_offload"},
        ),
        "deepspeed": (DeepSpeedPlugin, {}),
        "megatron_lm": (MegatronLMPlugin, {}),
    }
    for name, (plugin, renamed) in plugins.items():
        said = {
            each.removeprefix(f"{name}_"): value for each, value in values.get(f"{name}_config", {}).items()
        }
        said = {renamed.get(each, each): value for each, value in said.items()}
        known = {each.name for each in fields(plugin)}
        assert said.keys() <= known, f"{plugin.__name__} has no {sorted(said.keys() - known)}"
        if said and plugin is not MegatronLMPlugin:  # whose constructor needs Megatron-LM
            plugin(**said)


def _megatron(text: str, plan: Plan) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    words = [word for word in words_of(text, "torchrun") if word.startswith("--")]
    said = {name: _value(value) for name, _, value in (word.partition("=") for word in words)}
    said = {name.lstrip("-").replace("-", "_"): value for name, value in said.items()}
    ours = {
        "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
        "ddp_bucket_size": "bucket_size",
    }
    said = {ours.get(name, name): value for name, value in said.items()}
    said.pop(
        "use_precision_aware_optimizer", None
    )  # its check asks TransformerEngine's version, which needs a GPU
    stages = plan.pp * said.get("virtual_pipeline_model_parallel_size", 1)
    shape = {"num_layers": 2 * stages, "hidden_size": 64 * plan.tp, "num_attention_heads": 4 * plan.tp}
    shape |= {"num_moe_experts": 2 * plan.ep} if plan.ep > 1 else {}
    used: set[str] = {"micro_batch_size", "global_batch_size", "seq_length", "nnodes", "nproc_per_node", "rdzv_backend",
                      "rdzv_endpoint", "rdzv_id", "max_restarts", "standalone"}  # fmt: skip
    for config, more in (
        (TransformerConfig, shape | ({"pipeline_dtype": "float"} if plan.pp > 1 else {})),
        (DistributedDataParallelConfig, {}),
        (OptimizerConfig, {"optimizer": "adam"}),
    ):
        known = {each.name for each in fields(config)} & said.keys()
        used |= known
        config(**{name: said[name] for name in known}, **more)
    assert said.keys() <= used, f"Megatron has no {sorted(said.keys() - used)}"
    calculator = ConstantNumMicroBatchesCalculator(
        said["global_batch_size"], said["micro_batch_size"], plan.dp, False, 0
    )
    assert calculator.get() == plan.microbatches


def _value(text: str) -> Any:
    return int(text) if text.isdecimal() else text or True


def _torchtitan(text: str, plan: Plan) -> None:
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torchtitan.distributed import ParallelDims

    written: dict[str, Any] = {}
    exec(text, written)  # real objects of torchtitan's classes, which check their fields
    config = written["parallelism"]
    ParallelDims(
        config.data_parallel_replicate_degree, config.data_parallel_shard_degree, config.context_parallel_degree,
        config.tensor_parallel_degree, config.pipeline_parallel_degree, 1, plan.ranks,
    )  # fmt: skip
    get_schedule_class(config.pipeline_parallel_schedule)
    training = written["training"]
    assert training.global_batch_size % (training.local_batch_size * plan.dp) == 0


def _fsdp(text: str, plan: Plan) -> None:
    exec(text, {})  # what it does with ranks: tests/formats/test_files.py


def _trainer(text: str, plan: Plan) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arguments.yaml"
        path.write_text(f"{text}use_cpu: true\noutput_dir: {folder}\n")
        (asked,) = HfArgumentParser(TrainingArguments).parse_yaml_file(str(path))
    assert asked.gradient_accumulation_steps == plan.microbatches


def _tf_config(text: str, plan: Plan) -> None:
    import tensorflow

    os.environ["TF_CONFIG"] = text
    assert (
        tensorflow.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec().num_tasks("worker")
        == plan.ranks
    )


VALIDATORS: dict[str, tuple[str, Callable[[str, Plan], None]]] = {
    "torchrun": ("torch.distributed.run's parser", _torchrun),
    "slurm": ("bash -n", _slurm),
    "deepspeed": ("DeepSpeedConfig", _deepspeed),
    "accelerate": ("ClusterConfig, ParallelismConfig and the plugins", _accelerate),
    "fsdp": ("Python", _fsdp),
    "megatron": (
        "megatron-core's TransformerConfig, DistributedDataParallelConfig, OptimizerConfig",
        _megatron,
    ),
    "torchtitan": ("ParallelismConfig, TrainingConfig, ParallelDims", _torchtitan),
    "trainer": ("TrainingArguments", _trainer),
    "tf_config": ("TFConfigClusterResolver", _tf_config),
}
"""The framework's check of each format, and what it is called."""
