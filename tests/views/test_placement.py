"""Which rank holds what, on which node, and who talks to whom over which link."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mpkit as mk
from mpkit.models import GPT
from mpkit.plan.mesh import Mesh
from mpkit.strategies.placement.placed_ranks import place
from mpkit.views.placement.text import divided_layers

SVG = "{http://www.w3.org/2000/svg}"
STAGES = [["embed", "block0", "block1"], ["block2", "block3", "head"]]
SHARDS = {
    f"block{i}.mlp.{name}.{kind}": parts
    for i in range(4)
    for name, kind, parts in (
        ("up", "weight", ["rows 0-3", "rows 4-7"]),
        ("up", "bias", ["elements 0-3", "elements 4-7"]),
        ("down", "weight", ["columns 0-3", "columns 4-7"]),
    )
}
NODES = replace(mk.hardware("2x8-h100-ib"), per_node=4)


def test_three_dimensions_on_two_nodes() -> None:
    found = place(Mesh(pp=2, dp=2, tp=2), STAGES, SHARDS, NODES)
    assert found.nodes == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert found.layers_of(3) == STAGES[0] and found.layers_of(4) == STAGES[1]
    assert found.part("block2.mlp.up.weight", 5) == "rows 4-7" and found.part("head", 5) == ""
    assert [(talk.axis, talk.crosses, talk.link and talk.link.name) for talk in found.talks] == [
        ("tp", False, "NVLink 4"),
        ("dp", False, "NVLink 4"),
        ("pp", True, "InfiniBand NDR, a card a GPU"),
    ]
    assert found.talks[0].groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    # Numbers in which layers differ are stars, and biases go with their weights.
    assert divided_layers(found) == [
        ("block*.mlp.up", ["rows 0-3", "rows 4-7"]),
        ("block*.mlp.down", ["columns 0-3", "columns 4-7"]),
    ]
    text = str(found)
    assert text.startswith("pp 2 x dp 2 x tp 2 = 8 ranks, on 2 nodes of 4 H100 SXM")
    assert "  rank 4   pp1 dp0 tp0   block2 to 3, head" in text
    assert "  pp  (0 4) (1 5) (2 6) (3 7), InfiniBand NDR, a card a GPU between nodes" in text


def test_of_a_plan_and_a_model() -> None:
    model = GPT(layers=4, width=16, heads=2)
    found = mk.Plan.gpipe(2, 4, cut=["block2"]).placement(model, hardware="8x-h100-nvlink")
    assert found.stages == (("embedding", "block0", "block1"), ("block2", "block3", "head"))
    assert found.notes == ()
    assert "balanced by their parameters" in mk.Plan.gpipe(2, 4).placement(model).notes[0]
    # A rank with several stages has the layers of each; without a model, only who talks to whom.
    looped = mk.Plan.pipeline("interleaved_1f1b", 2, 4, virtual_stages=2, cut=[1, 2, 3])
    assert looped.placement(model).layers_of(0) == ["embedding", "block1"]
    bare = mk.Plan.ddp(4).placement()
    assert bare.layers_of(0) == [] and [talk.axis for talk in bare.talks] == ["dp"]
    assert mk.Plan.serial().placement().talks == []
    with pytest.raises(ValueError, match="16 ranks, and it has 8 devices"):
        mk.Plan.ddp(16).placement(hardware="8x-h100-nvlink")
