"""What is written, literally; what is refused; what other people's files say."""

import json
from pathlib import Path
from typing import Any

import pytest

from mpkit import Plan
from mpkit.plan.formats.frameworks import FORMATS

SAID_IN_FULL = [
    ("deepspeed", Plan.zero(3, 8, microbatches=4, precision="bf16", offload="params")),
    ("accelerate", Plan.serial()),
    ("accelerate", Plan.zero(1, 4, microbatches=2, bucket_mb=5e8 * 4 / 2**20)),
    ("accelerate", Plan.zero(3, 4, offload="params", recompute="full")),
    ("accelerate", Plan(dp=2, tp=2, cp=2, zero=2)),
    ("accelerate", Plan(pp=2, dp=2, tp=2, schedule="1f1b", microbatches=4, zero=1, sequence_parallel=True,
                        bucket_mb=2**20)),
    ("megatron", Plan(pp=2, dp=2, tp=2, schedule="1f1b", microbatches=4, zero=1, sequence_parallel=True)),
    ("megatron", Plan(dp=2, cp=4, cp_method="ulysses", schedule="1f1b")),
    ("deepspeed", Plan(dp=2, cp=4, cp_method="ulysses", zero=3)),
    ("megatron", Plan(pp=2, dp=4, tp=2, zero=1, schedule="1f1b", microbatches=4, sequence_parallel=True, ep=8, etp=1)),
    ("megatron", Plan(pp=2, dp=2, schedule="overlapped_1f1b", virtual_stages=2, microbatches=4, precision="bf16",
                      ep=2)),
    ("torchtitan", Plan(dp=4, tp=2, zero=3, sequence_parallel=True, ep=8, etp=1)),
    ("torchtitan", Plan(pp=2, dp=2, tp=2, cp=2, schedule="gpipe", microbatches=4, zero=3, cp_order="zigzag")),
    ("torchtitan", Plan(pp=2, schedule="interleaved_1f1b", virtual_stages=2, microbatches=4)),
    ("fsdp", Plan.zero(3, 8, microbatches=4, precision="bf16", recompute="full", offload="params")),
    ("trainer", Plan.serial(microbatches=4, precision="fp16")),
    ("torchrun", Plan.ddp(8)),
    ("tf_config", Plan.ddp(4)),
]  # fmt: skip

NO_EFFECT = {"schedule"}  # of a plan without stages


@pytest.mark.parametrize(("name", "plan"), SAID_IN_FULL, ids=str)
def test_what_a_format_can_say_in_full(name: str, plan: Plan) -> None:
    config = plan.to(name)  # a warning would be an error
    assert config.cannot_say.keys() <= NO_EFFECT
    assert config.kind == name


def test_deepspeed_literally() -> None:
    config = Plan.zero(2, 4, microbatches=2, precision="bf16", bucket_mb=10).to("deepspeed", micro_batch=3)
    assert json.loads(config) == {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5 * 2**20},
        "bf16": {"enabled": True},
    }
    lines = repr(config).splitlines()
    assert len([line for line in lines if "//" in line]) == 1 + len(config.comments) == 7
    assert all(comment in repr(config) for comment in config.comments.values())


def test_what_cannot_be_said_is_in_the_head_in_the_mapping_and_in_a_warning() -> None:
    plan = Plan(pp=2, schedule="zb_h1", microbatches=4)
    with pytest.warns(UserWarning, match=r"Accelerate's configuration cannot say all of .*zb_h1.*1F1B"):
        config = plan.to("accelerate")
    assert "1F1B" in config.cannot_say["schedule"]
    assert "#   schedule='zb_h1': through Megatron-LM Accelerate runs 1F1B" in config


@pytest.mark.filterwarnings("ignore:transformers")
@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"deepspeed", "tf_config"}))
def test_every_key_of_a_text_has_its_comment(name: str) -> None:
    config = Plan.zero(3, 16).to(name) if name == "fsdp" else Plan.ddp(16).to(name)
    assert config.comments
    assert all(f"# {comment}" in config for comment in config.comments.values())


REFUSED: list[tuple[Plan, str, dict[str, Any], str]] = [
    (Plan.ddp(4), "deepsped", {}, r"no format 'deepsped'.*plan.to\('deepspeed'\)"),
    (Plan.ddp(4), "deepspeed", {"microbatch": 3}, "did you mean micro_batch=3"),
    (Plan.ddp(4), "deepspeed", {"micro_batch": 0}, "1 or more: micro_batch=4"),
    (Plan.ddp(4), "deepspeed", {"global_batch": 6}, r"dp x microbatches = 4 x 1.*global_batch=8"),
    (Plan.ddp(4), "deepspeed", {"global_batch": 8, "micro_batch": 1}, "global_batch=4"),
    (Plan.ddp(12), "torchrun", {"nodes": 5}, "12 ranks.*nodes=2, gpus_per_node=6"),
    (Plan.ddp(12), "torchrun", {"nodes": 2, "gpus_per_node": 8}, "nodes=2, gpus_per_node=6"),
    (Plan.ddp(2), "torchrun", {"script": "train.py; rm -rf /"}, "without spaces or quotes"),
    (Plan.zero(1, 4), "fsdp", {}, r"ZeRO-2 or ZeRO-3: Plan\(dp=4, zero=3\)"),
    (Plan(pp=2, dp=2, zero=2), "deepspeed", {}, r"pipeline engine.*zero=1"),
    (Plan(pp=2, schedule="interleaved_1f1b", virtual_stages=2, microbatches=3), "megatron", {}, "microbatches=4"),
    (Plan.ddp(16), "tf_config", {"master": "10.0.0.1"}, "master='node0'"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "name", "context", "says"), REFUSED, ids=str)
def test_what_is_refused_says_why_and_what_works(plan: Plan, name: str, context: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan.to(name, **context)


def test_unknown_keys_are_listed() -> None:
    text = (
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "steps_per_print": 5, "zero_force": 1}'
    )
    with pytest.warns(UserWarning, match="Plan says nothing of it: zero_force, steps_per_print"):
        assert Plan.read(text) == Plan()
    with pytest.raises(ValueError, match="hybrid_shard shards within a node"):
        Plan.read("per_device_train_batch_size: 1\nfsdp: hybrid_shard")


def test_a_format_is_taken_only_where_one_of_its_own_keys_is_there(tmp_path: Any) -> None:
    """P6: a pyproject.toml was torchtitan's, and {"train_batch_size": 32, "epochs": 3} DeepSpeed's."""
    path = tmp_path / "pyproject.toml"
    path.write_text('[project]\nname = "anything"\nversion = "0.1"\n')
    with pytest.raises(ValueError, match="no key of a format"):
        Plan.read(path)
    with pytest.raises(ValueError, match=r"cannot be read as torchtitan|no key of torchtitan"):
        Plan.read(path, format="torchtitan")
    with pytest.raises(ValueError, match="format='deepspeed'"):
        Plan.read({"train_batch_size": 32, "epochs": 3})


# ---- Texts that break other readers: each is read for what it says, or refused with file, place and reason

DEEPSPEED = """{"zero_optimization": {"stage": 2},
 "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}"""

READ_AS_WRITTEN: dict[str, bytes] = {
    "a mark of the byte order": b"\xef\xbb\xbf" + DEEPSPEED.encode(),
    "a trailing comma": DEEPSPEED.replace("1}", "1,\n}").encode(),
    "comments": f"// of ours\n# too\n/* {{ */ {DEEPSPEED[:-1]} # the end, }}\n}}".encode(),
    "a comment in a string": DEEPSPEED.replace(
        '"train_b', '"note": "# no, // comment, /*, }",\n"train_b'
    ).encode(),
    "all of them": b"\xef\xbb\xbf/* a\n b */" + DEEPSPEED.replace("2}", "2, /*,*/}").encode(),
}


@pytest.mark.filterwarnings("ignore:.*Plan says nothing of it. note")
@pytest.mark.parametrize("what", READ_AS_WRITTEN)
def test_json_as_people_write_it(tmp_path: Path, what: str) -> None:
    path = tmp_path / "ds_config.json"
    path.write_bytes(READ_AS_WRITTEN[what])
    assert Plan.read(path) == Plan.read(path.read_text("utf-8")) == Plan.zero(2, 2, bucket_mb=5e8 * 4 / 2**20)


BOMBS: dict[str, tuple[str, str]] = {
    "an alias of itself": ("a: &a {b: *a}\n", "an alias is not read"),
    "tags": ("a: !!python/object/apply:os.system [true]\n", "could not determine a constructor"),
    "deep YAML": ("a:\n " + "[" * 10_000, "50 deep"),
    "deep JSON": ('{"a":' * 10_000, "nested too deeply"),
    "deep Python": ("x = " + "(" * 5_000 + ")" * 5_000 + "\n", "no Python that can be read"),
    "variables that double": (
        "A=" + "x" * 99 + "\n" + "A=$A$A\n" * 30 + "torchrun --nnodes $A x.py\n", "nowhere, several times"
    ),
    "a long text": ("x: 1\n" * 300_000, "1,500,000 characters"),
    "ranks": ("torchrun --nnodes 1000000000 --nproc-per-node 1000000000 \\\n x.py", "dp is at most 1,000,000"),
    "infinity": ('{"zero_optimization": {"reduce_bucket_size": 1e999}}', "a whole number, 1 or more"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The text, read as")
@pytest.mark.parametrize("what", BOMBS)
def test_bombs(what: str) -> None:
    text, says = BOMBS[what]
    with pytest.raises(ValueError, match=says) as caught:
        Plan.read(text)
    assert len(str(caught.value)) < 2_000


MEGATRON = "torchrun --nproc-per-node 8 \\\n pretrain_gpt.py --tensor-model-parallel-size "
TWO = Plan(dp=4, tp=2, schedule="1f1b", bucket_mb=2**20)  # no overlap: all gradients at once

SCRIPTS: dict[str, str] = {
    "assigned": f"TP=2\n{MEGATRON}$TP",
    "in brackets": f'export TP="2"; {MEGATRON}"${{TP}}"',
    "a default": f"{MEGATRON}${{TP:-2}}",
    "an argument's default": f"TP=${{1:-2}}\n{MEGATRON}$TP",
    "calculated": f"GPUS=8\nTP=$((GPUS / (2 * 2)))\n{MEGATRON}$TP",
    "in an array": 'TP=2\nARGS=(\n  --tensor-model-parallel-size $TP # ranks\n)\ntorchrun --nproc-per-node=8 '
    'x.py "${ARGS[@]}"',
    "added": 'TP=2\nARGS="--nproc-per-node=8"\nARGS+=" --tensor-model-parallel-size=$TP"\ntorchrun $ARGS x.py',
}  # fmt: skip


@pytest.mark.parametrize("what", SCRIPTS)
def test_variables_that_the_script_assigns(what: str) -> None:
    assert Plan.read(SCRIPTS[what]) == TWO


OPEN: dict[str, str] = {
    "not assigned": f"{MEGATRON}$TP", "said twice": f"TP=2\nTP=4\n{MEGATRON}$TP",
    "of each other": f"TP=$A\nA=$TP\n{MEGATRON}$TP", "after a test": f"[ $X ] && TP=4\n{MEGATRON}$TP",
    "changed": f"TP=22\n{MEGATRON}${{TP%2}}", "in an if": f"TP=2\nif [ $X ]; then\n  TP=4\nfi\n{MEGATRON}$TP",
    "a loop's": f"for TP in 1 2; do\n{MEGATRON}$TP\ndone", "twice": f"{MEGATRON}2\n{MEGATRON}4",
}  # fmt: skip


@pytest.mark.parametrize("what", OPEN)
def test_variables_that_nobody_knows_are_refused_by_name(what: str) -> None:
    with pytest.raises(ValueError, match=r"megatron: --tensor-model-parallel-size = .*a whole number"):
        Plan.read(OPEN[what])
    with pytest.raises(ValueError, match=r"torchrun: --nnodes=\$N: .*nowhere, several times"):
        Plan.read("torchrun --nproc-per-node 2 --nnodes $N \\\n x.py")


def test_variables_that_may_hold_more_are_named() -> None:
    with pytest.warns(UserWarning, match=r"Plan says nothing of it: \$MORE$"):
        assert Plan.read("torchrun --nproc-per-node=2 \\\n x.py $MORE $@") == Plan.ddp(2)
