"""A Plan says what it is, and why it cannot be; its mesh says which rank is where and holds what."""

import re
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import mpkit as mk
from mpkit.plan.kinds import constructors
from mpkit.plan.mesh import AXES, Mesh
from mpkit.plan.plan import Plan
from mpkit.plan.schedule import Schedule
from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.stage.shard import HeldPart, Shard, evenly, put_together

# ---- A Plan says what it is, and why it cannot be.

OWN = Schedule(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], name="mine")

PLANS = [
    Plan.serial(),
    Plan.serial(microbatches=4),
    Plan.naive_mp(4),
    Plan.gpipe(4, 8),
    Plan.gpipe(4, 8, recompute="full"),
    Plan.gpipe(3, 2, cut=[2, "head"]),
    Plan.from_schedule(OWN),
    Plan.from_schedule(["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"], recompute="full"),
]


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_json_and_repr_make_the_same_plan_again(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    assert eval(repr(plan), {"Plan": Plan, "Schedule": Schedule}) == plan
    assert plan.describe().endswith(".")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"pp": 0}, r"Plan\(pp=0\): pp is a whole number, 1 or more"),
    ({"microbatches": 2.5}, r"microbatches=2.5.*microbatches=8"),
    ({"pp": True}, "whole number"),
    ({"pp": 4, "schedule": "gpip"}, r"nearest is Plan\(pp=4, schedule='gpipe'\)"),
    ({"pp": 4, "schedule": 7}, "'naive', 'gpipe', '1f1b'"),
    ({"pp": 4, "recompute": "ful"}, "Did you mean .*recompute='full'"),
    ({"pp": 4, "recompute": True}, "'none', 'selective', 'full'"),
    ({"pp": 2, "dp": 2, "data_parallel": "dp"}, r"lends the whole model.*Plan\(pp=2, dp=2, schedule='gpipe'\)"),
    ({"dp": 2, "zero": 4}, "stages 1 .*zero=1"),
    ({"dp": 2, "data_parallel": "DDP"}, "Did you mean Plan.dp=2.$"),
    ({"dp": 2, "precision": "float16"}, "Did you mean .*precision='fp16'"),
    ({"dp": 2, "bucket_mb": 0}, "bucket_mb=10"),
    ({"dp": 2, "zero": 3, "prefetch": -1}, "0 or more"),
    ({"dp": 2, "offload": "params"}, "zero=3"),
    ({"dp": 2, "zero": 1, "data_parallel": "dp"}, "shards nothing"),
    ({"tp": 0}, r"tp is a whole number.*Plan\(tp=4\)"),
    ({"sequence_parallel": True}, r"tp=1. Either Plan\(tp=2, sequence_parallel=True\), or.*Plan\(cp=2\)"),
    ({"cp": 2, "cp_order": "zig"}, r"Plan\(cp=2, cp_order='zigzag'\)"),
    ({"tp": 2, "tensor": {"regions": ()}}, "is an mk.tensor.TensorPlan"),
    ({"pp": 2, "virtual_stages": 2}, r"gpipe has one stage per rank.*interleaved_1f1b"),
    ({"pp": 2, "virtual_stages": 3, "schedule": "zbv"}, "zbv has 2 stages per rank"),
    ({"pp": 2, "schedule": "interleaved"},
        r"nearest is Plan\(pp=2, schedule='interleaved_1f1b'.*virtual_stages=2"),
    ({"pp": 2, "virtual_stages": 2, "schedule": "1F1B"}, r"nearest is Plan\(pp=2, schedule='1f1b'\)"),
    ({"pp": 2, "virtual_stages": 2, "schedule": OWN, "microbatches": 2},
        "another number of stages, and the schedule has 2"),
    ({"pp": 2, "virtual_stages": 2, "schedule": "looped_bfs", "cut": [1]},
        "than the 4 that pp=2, virtual_stages=2 asks for"),
    ({"pp": 4, "cut": [1, 2]}, "than the 4 that pp=4 asks for"),
    ({"pp": 2, "cut": [0]}, "by number from 1"),
    ({"pp": 2, "schedule": []}, "the schedule is empty"),
    ({"pp": 2, "schedule": lambda: []}, "no function of .p, m. that makes one .too many positional arguments"),
    ({"dp": 2**63}, r"dp=9223372036854775808\): that is more than any machine has.*at most 1,000,000"),
    ({"dp": 10**4, "tp": 10**3}, r"has 10,000,000 ranks.*at most 1,000,000"),
    ({"pp": 4, "schedule": OWN}, r"2 rows and 2 micro-batches. Write Plan.from_schedule"),
]  # fmt: skip


@pytest.mark.parametrize("asked, words", REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_says_why_and_what_could(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        Plan(**asked)
    _, proposed = str(caught.value).rsplit(" Plan(", 1)
    assert eval("Plan(" + proposed, {"Plan": Plan, "schedule": OWN}).ranks >= 1, "what it proposes works"


def test_broken_json() -> None:
    with pytest.raises(ValueError, match="no plan in JSON"):
        Plan.from_json("{")
    with pytest.raises(ValueError, match="no plan in JSON"):
        Plan.from_json("[3]")
    with pytest.raises(ValueError, match=r"no 'microbatch'. Did you mean 'microbatches'\?"):
        Plan.from_json('{"pp": 4, "microbatch": 8}')


@pytest.mark.parametrize("name", sorted(constructors()))
def test_constructors_of_other_libraries_are_answered_with_a_call_that_works(name: str) -> None:
    with pytest.raises(mk.errors.UnknownName, match=re.escape(f"{name}; it is {constructors()[name]} here")):
        getattr(Plan, name)
    assert eval(constructors()[name], {"Plan": Plan}).ranks > 1


@pytest.mark.parametrize(("given", "meant", "words"), [
    ({"precision": "fp32"}, {}, "precision='full'"),
    ({"precision": "bfloat16"}, {"precision": "bf16"}, ""),
    ({"precision": "16-mixed"}, {"precision": "fp16"}, ""),
    ({"precision": "O1"}, {"precision": "bf16"}, "each operator"),
    ({"precision": "O2"}, {"precision": "fp16"}, "loss scaling"),
    ({"precision": "autocast"}, {"precision": "bf16"}, "torch.autocast"),
    ({"zero": "full_shard"}, {"zero": 3}, "ZeRO-3"),
    ({"zero": "SHARD_GRAD_OP"}, {"zero": 2}, "ZeRO-2"),
    ({"zero": "hybrid_shard"}, {"zero": 3}, "those of a node"),
    ({"data_parallel": "hybrid_shard"}, {"zero": 3}, "those of a node"),
])  # fmt: skip
def test_values_of_other_libraries_are_answered_with_ours(
    given: dict[str, Any], meant: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError) as caught:
        Plan(dp=2, **given)
    message = str(caught.value)
    assert words in message
    assert message.endswith(repr(Plan(dp=2, **meant)))


TYPED: dict[str, list[Any]] = {
    "pp": [0, 1, 2, 3, 8, 2.5, "2"],
    "dp": [0, 1, 2, 3, 4, 7, 8],
    "tp": [1, 2, 3, 8],
    "cp": [1, 2, 3, 4, 8],
    "ep": [1, 2, 3, 4, 8],
    "schedule": ["gpipe", "1f1b", "1F1B", "zbv", "zb-h1", "interleaved", "interleaved_1f1b", "dualpipe", 3],
    "microbatches": [1, 4, 0, 2.0],
    "virtual_stages": [1, 2, 3, 0],
    "recompute": ["none", "full", "every=2", "every=0", "ful", True],
    "cut": [(1,), (2, 3), (0,), [3, 1], "block1", 5],
    "data_parallel": ["ddp", "dp", "fsdp"],
    "zero": [0, 1, 2, 3, 4, "3"],
    "offload": ["none", "optimizer", "params", "cpu"],
    "precision": ["full", "bf16", "fp16", "fp32", "fp8"],
    "bucket_mb": [0, -1, 25.0],
    "prefetch": [-1, 0, 2],
    "batchnorm": ["sync", "local", "x"],
    "unused": ["error", "allow", "ok"],
    "cp_order": ["contiguous", "zigzag", "balanced", "zig"],
    "cp_method": ["ring", "ulysses", (2, 2), "both"],
    "sequence_parallel": [True, False, 1],
    "dp_shard": [1, 2, 3, 8],
}


@settings(max_examples=400, deadline=None)
@given(st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in TYPED.items()}))
def test_every_plan_that_a_rejection_suggests_works(values: dict[str, Any]) -> None:
    """Whatever else is wrong with what was asked: what a message begins with is that, and all other plans work."""
    try:
        mk.Plan(**values)
    except ValueError as error:
        message = str(error)
    else:
        assume(False)
    nested = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"
    suggested = [found for found in re.finditer(rf"Plan\({nested}\)", message) if found.start()]
    for found in suggested:
        assert eval(found[0], {"Plan": mk.Plan}), message


def test_constructors_take_every_other_field() -> None:
    assert mk.Plan.gpipe(4, 8, precision="bf16").precision == "bf16"
    assert mk.Plan.naive_mp(2, recompute="full").recompute == "full"
    with pytest.raises(ValueError, match=r"no argument precison; did you mean precision='bf16'"):
        mk.Plan.gpipe(4, 8, precison="bf16")


@pytest.mark.parametrize(("name", "meant"), [
    ("zero_bubble", "zb_h1"),
    ("ZB", "zb_h1"),
    ("interleaved", "interleaved_1f1b"),
    ("dualpipe", "dualpipev"),
])  # fmt: skip
def test_a_schedule_by_the_name_of_its_paper_is_answered_with_ours(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"The nearest is Plan\(pp=4, schedule='{meant}'"):
        mk.Plan.pipeline(name, 4, 8)


def test_words_that_are_no_order_and_no_tensor_plan_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"cp_order='zigzagg': one of .*'zigzag'"):
        mk.attention_work([4, 12], 2, "zigzagg")
    with pytest.raises(ValueError, match=r"is none that Plan\.to_json wrote"):
        mk.Plan.from_json({"tensor": {"foo": 1}})


# ---- The mesh: which rank is where, whom it talks to along which axis, and which part of a parameter it holds.

degrees = st.integers(1, 4)


@given(degrees, degrees, degrees, degrees, st.sets(st.sampled_from(AXES)))
def test_groups_part_the_ranks(pp: int, dp: int, cp: int, tp: int, axes: set[str]) -> None:
    mesh = Mesh(pp, dp, cp, tp)
    places = [mesh.place(rank) for rank in range(mesh.size)]
    assert [mesh.rank(*place) for place in places] == list(range(mesh.size))
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert list(group) == sorted(group)
        for axis in set(AXES) - axes:
            assert len({getattr(places[rank], axis) for rank in group}) == 1


def test_every_axis_talks_to_its_own(clusters: Any) -> None:
    mesh = Mesh(pp=2, dp=2, tp=2)
    wanted = [("tp",), ("dp",), ("pp",), ("dp", "cp"), ("pp", "tp"), ("cp",), AXES]

    def talk(ctx: Any) -> list[tuple[float, list[float]]]:
        axes = MeshAxes(ctx.comm, ctx.device, mesh)
        found = []
        for names in wanted:
            axis, mine = axes.communicator_of(*names), torch.tensor([float(ctx.rank)])
            gathered = axis.all_gather(mine)
            part = axis.reduce_scatter(torch.ones(axis.size) * ctx.rank).item()
            assert part == sum(axis.ranks)
            found.append((axis.all_reduce(mine.clone()).item(), gathered.tolist()))
        return found

    for rank, found in enumerate(clusters(8).run(talk)):
        for names, (total, gathered) in zip(wanted, found, strict=True):
            group = mesh.group(rank, *names)
            assert total == sum(group) and gathered == [float(r) for r in group]


@given(st.integers(0, 20), st.integers(1, 6))
def test_even_ranges_differ_by_one_at_most(count: int, t: int) -> None:
    parts = evenly(count, t)
    assert [i for part in parts for i in part] == list(range(count)) and len(parts) == t
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@settings(max_examples=30)
@given(st.data())
def test_the_shards_of_a_parameter_make_it_whole(data: st.DataObject) -> None:
    t, dim = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 1))
    fused = data.draw(st.integers(1, 3))
    one = data.draw(st.integers(t, 7))
    shape = [3, 3]
    shape[dim] = fused * one
    whole = torch.randn(*shape)
    shards = [
        Shard(tuple(shape), dim, tuple(range(k * one + p.start, k * one + p.stop) for k in range(fused)))
        for p in evenly(one, t)
    ]
    parts = [shard.take(whole) for shard in shards]
    assert all(tuple(part.shape) == shard.shape for part, shard in zip(parts, shards, strict=True))
    assert torch.equal(put_together(list(map(HeldPart.of_shard, shards, parts))), whole)
