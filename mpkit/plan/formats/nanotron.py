"""nanotron's YAML: the sections that a plan decides (parallelism, tokens, optimizer, model)."""

from __future__ import annotations

from mpkit.plan.formats.keys import Format, FormatKey, choice, context, flag, number, number_of
from mpkit.plan.formats.syntax import YAML
from mpkit.plan.schedule.catalogue import ONE_F_ONE_B, names_in

__all__ = ["NANOTRON"]


NANOTRON = Format(
    "nanotron",
    "nanotron's configuration (the sections that a plan decides)",
    YAML,
    (
        number("parallelism.dp", "dp", "replicas"),
        number("parallelism.pp", "pp", "pipeline ranks"),
        number("parallelism.tp", "tp", "ranks that share each layer"),
        number("parallelism.context_parallel_size", "cp", "ranks that share each sequence"),
        choice("parallelism.pp_engine", "schedule", names_in("nanotron"),
               "the order of a pipeline: afab is GPipe's, all forwards, then all backwards", otherwise=ONE_F_ONE_B),
        choice("parallelism.tp_mode", "sequence_parallel", {False: "ALL_REDUCE", True: "REDUCE_SCATTER"},
               "REDUCE_SCATTER divides the sequence between layers too"),
        context("parallelism.tp_linear_async_communication", "whether it overlaps with compute",
                lambda asked: asked.plan.sequence_parallel, (bool,)),
        flag("parallelism.recompute_layer", "recompute", "full", "recomputes each layer in the backward", always=True),
        context("parallelism.expert_parallel_size", "ranks that share experts", lambda asked: 1, (int,)),
        context("tokens.sequence_length", "tokens per sample", lambda asked: asked.sequence, (int,)),
        context("tokens.micro_batch_size", "samples per micro-batch and replica", lambda asked: asked.micro_batch,
                (int,)),
        number("tokens.batch_accumulation_per_replica", "microbatches", "micro-batches per optimizer step"),
        choice("optimizer.zero_stage", "zero", {0: 0, 1: 1}, "1 shards optimizer states among replicas", otherwise=1),
        context("optimizer.accumulate_grad_in_fp32", "whether gradients add up in 32 bits",
                lambda asked: asked.plan.precision != "full", (bool,)),
        choice("model.dtype", "precision", {"full": "float32", "bf16": "bfloat16"}, "what it computes in",
               otherwise="bfloat16"),
        FormatKey("model.ddp_bucket_cap_mb", "MiB of gradients that are reduced at once",
            lambda asked: round(asked.plan.bucket_mb) or 1, lambda value: {"bucket_mb": number_of(value)},
            ("bucket_mb",)),
    ),
    reasons={
        "virtual_stages": "nanotron has one stage per rank",
        "cut": "nanotron balances the stages itself",
        "offload": "nanotron keeps everything on the GPU",
        "recompute": "recompute_layer recomputes each layer or none",
        "bucket_mb": "ddp_bucket_cap_mb is a whole number",
        "prefetch": "nanotron does not shard parameters",
        "cp_order": "the order of a sequence is the model's",
        "tensor": "which layers are divided is in the model's code",
    },
)  # fmt: skip
