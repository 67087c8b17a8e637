"""Texts that break other readers: each is read for what it says, or refused with its file, the place and the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpkit import Plan

SPEED = """{"zero_optimization": {"stage": 2},
 "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}"""

READ_AS_WRITTEN: dict[str, bytes] = {
    "a mark of the byte order": b"\xef\xbb\xbf" + SPEED.encode(),
    "a trailing comma": SPEED.replace("1}", "1,\n}").encode(),
    "comments": f"// of ours\n# too\n/* {{ */ {SPEED[:-1]} # the end, }}\n}}".encode(),
    "a comment in a string": SPEED.replace(
        '"train_b', '"note": "# no, // comment, /*, }",\n"train_b'
    ).encode(),
    "all of them": b"\xef\xbb\xbf/* a\n b */" + SPEED.replace("2}", "2, /*,*/}").encode(),
}


@pytest.mark.filterwarnings("ignore:.*Plan says nothing of it. note")
@pytest.mark.parametrize("what", READ_AS_WRITTEN)
def test_json_as_people_write_it(tmp_path: Path, what: str) -> None:
    path = tmp_path / "ds_config.json"
    path.write_bytes(READ_AS_WRITTEN[what])
    assert Plan.read(path) == Plan.read(path.read_text("utf-8")) == Plan.zero(2, 2, bucket_mb=5e8 * 4 / 2**20)


BOMBS: dict[str, tuple[str, str]] = {
    "an alias of itself": ("a: &a {b: *a}\n", "is an alias"),
    "tags": ("a: !!python/object/apply:os.system [true]\n", "line 1: .* is a tag"),
    "deep YAML": ("a:\n " + "[" * 10_000, "50 levels"),
    "long YAML": ("a: [" + "1,\n" * 21_000 + "]", "20,000 values"),
    "deep JSON": ('{"a":' * 100_000, "nested too deeply"),
    "deep Python": ("x = " + "(" * 5_000 + ")" * 5_000 + "\n", "no Python that can be read"),
    "variables that double": (
        "A=" + "x" * 99 + "\n" + "A=$A$A\n" * 30 + "torchrun --nnodes $A x.py\n", "more than 1,000,000 characters"
    ),
    "a long text": ("x: 1\n" * 300_000, "1,500,000 characters"),
    "ranks": ("torchrun --nnodes 1000000000 --nproc-per-node 1000000000 \\\n x.py", "dp is at most 1,000,000"),
    "infinity": ('{"zero_optimization": {"reduce_bucket_size": 1e999}}', "a number of elements, above 0"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The text, read as")
@pytest.mark.parametrize("what", BOMBS)
def test_bombs(what: str) -> None:
    text, says = BOMBS[what]
    with pytest.raises(ValueError, match=says) as caught:
        Plan.read(text if what != "a list for a word" else {"--data-parallel-sharding-strategy": [1]})
    assert len(str(caught.value)) < 2_000


# ---------------------------------------------------------------- values that a program would compute

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
    "not assigned": f"{MEGATRON}$TP",
    "changed": f"TP=22\n{MEGATRON}${{TP%2}}",
    "in an if": f"TP=2\nif [ $X ]; then\n  TP=4\nfi\n{MEGATRON}$TP",
    "a loop's": f"for TP in 1 2; do\n{MEGATRON}$TP\ndone",
    "twice": f"{MEGATRON}2\n{MEGATRON}4",
}


@pytest.mark.filterwarnings("ignore:.*within an `if` or a loop")
@pytest.mark.parametrize("what", OPEN)
def test_variables_that_nobody_knows_are_refused_by_name(what: str) -> None:
    with pytest.raises(ValueError, match=r"megatron: --tensor-model-parallel-size = .*(is open|says both)"):
        Plan.read(OPEN[what])
    with pytest.raises(ValueError, match=r"torchrun: --nnodes=\$N,.*\$N is open"):
        Plan.read("torchrun --nproc-per-node 2 --nnodes $N \\\n x.py")


def test_variables_that_may_hold_more_are_named() -> None:
    with pytest.warns(UserWarning, match=r"Plan says nothing of it: \$MORE$"):
        assert Plan.read("torchrun --nproc-per-node=2 \\\n x.py $MORE $@") == Plan.ddp(2)
    with pytest.warns(UserWarning, match="--sequence-parallel is within an `if`"):
        Plan.read(f"{MEGATRON}2 --seq-length 8\nif [ $X ]; then ARGS+=(--sequence-parallel); fi")
