"""Plans of tensor parallelism: which are found, what they leave on a rank, and what is said of what cannot be."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.models import GPT, MLP
from mpkit.parallel.axis import Pretended
from mpkit.parallel.tensor import check, shard_model

# Ranks get this module's functions by value, and need not import the module and what tests need.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES: dict[str, Any] = {"layers": 2, "width": 12, "heads": 3, "vocab": 20, "length": 6}


def test_partial_gradients_are_those_of_what_works_on_a_part() -> None:
    model = GPT(**SIZES | {"layers": 1})
    assert shard_model(copy.deepcopy(model), Pretended(2)).partial == frozenset()
    found = shard_model(copy.deepcopy(model), Pretended(2), sequence=True).partial
    names = ["norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "attention.out.bias", "mlp.out.bias"]
    assert found == {"head.norm.weight", "head.norm.bias", *(f"block0.{name}" for name in names)}


def test_tied_weights_stay_tied_and_are_sharded_alike() -> None:
    model = GPT(**SIZES)
    model.head.logits.weight = model.embedding.tokens.weight
    sharded = shard_model(model, Pretended(3, 1))
    assert model.head.logits.weight is model.embedding.tokens.weight
    tied = [sharded.shards[name] for name in ("head.logits.weight", "embedding.tokens.weight")]
    assert tied[0] == tied[1] and tied[0].ranges == (range(7, 14),)
    both = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    both[2].weight = both[0].weight
    with pytest.raises(ValueError, match=r"weight is divided in two ways.*0.weight and 2.weight"):
        shard_model(both, Pretended(2))


def test_plans_travel_as_json() -> None:
    plan = mk.find_tensor_plan(GPT(**SIZES))
    assert mk.TensorPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, 5, bias=False)
        self.last.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x).relu()
        return self.last(x)


def unknown_on_a_rank(ctx: Any, model: nn.Module, plan: mk.TensorPlan, x: Tensor) -> Tensor:
    return mk.tensor_parallel(ctx, model, plan)(x)


def test_an_unknown_model_gets_a_plan_to_paste(clusters: Callable[[int], mk.Cluster]) -> None:
    model, x = Unknown().double(), torch.randint(5, (3,))
    with pytest.raises(ValueError, match="No TensorPlan is known for Unknown") as caught:
        mk.find_tensor_plan(model)
    said = str(caught.value)
    pasted = said[said.index("mk.TensorPlan(") : said.index("\nWhere one layer")]
    assert "mk.Region('layers.*', column=('layers.*',))" in pasted
    plan = eval(pasted, {"mk": mk})
    for found in clusters(2).run(unknown_on_a_rank, model, plan, x):
        torch.testing.assert_close(found.detach(), model(x).detach())
    half = mk.TensorPlan((mk.Region("last", ("last",)),))
    with pytest.raises(
        ValueError, match=r"words.weight is the same.* as last's.*embeddings=\('words',\) does"
    ):
        shard_model(model, Pretended(2), half)
    with pytest.raises(ValueError, match="divides linear layers, and LayerNorm has none"):
        mk.find_tensor_plan(nn.LayerNorm(3))


def without_gradients(ctx: Any, model: nn.Module, plan: mk.TensorPlan, x: Tensor) -> Tensor:
    with torch.no_grad():
        return mk.tensor_parallel(ctx, model, plan)(x)


def test_torchs_own_transformer_layers(clusters: Callable[[int], mk.Cluster]) -> None:
    # Its attention takes weights out of a layer, and without gradients it would do so everywhere.
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    model, x = (
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double(),
        torch.randn(2, 3, 8).double(),
    )
    with pytest.raises(ValueError, match="No TensorPlan is known for TransformerEncoder") as caught:
        mk.find_tensor_plan(model)
    assert "out_proj" not in str(caught.value)
    plan = region("layers.*.linear1", ("layers.*.linear1",), "layers.*.linear2")
    expected = model(x).detach()
    for fn in (unknown_on_a_rank, without_gradients):
        for found in clusters(2).run(fn, model.train(fn is unknown_on_a_rank), plan, x):
            torch.testing.assert_close(found.detach(), expected)
    with pytest.raises(
        ValueError, match="out_proj is a NonDynamicallyQuantizableLinear, and what is divided"
    ):
        check(model, 2, region("layers.*.self_attn", ("layers.*.self_attn.out_proj",)))


def test_what_is_sharded_is_not_sharded_again() -> None:
    model = GPT(**SIZES)
    shard_model(model, Pretended(2))
    with pytest.raises(ValueError, match=r"its forward has been replaced.*start from copy.deepcopy\(model\)"):
        shard_model(model, Pretended(2))


def region(*args: Any, **kwargs: Any) -> mk.TensorPlan:
    return mk.TensorPlan((mk.Region(*args, **kwargs),))


ATTENTION = ("block*.attention", ("block*.attention.qkv",), "block*.attention.out")


@pytest.mark.parametrize(
    "plan, t, says",
    [
        (None, 4, r"tp=4: block0.attention has 3 heads.*each rank takes at least one: tp=3 is the most"),
        (region("block*.atention", ("a",)), 2, r"no module of the name 'block\*.atention'. It has 'block"),
        (region("block0.mlp", ("block0.mlp.down",)), 2, r"no module of the name 'block0.mlp.down'"),
        (region("block0.mlp", ("block*.mlp.up",)), 2, r"'block\*.mlp.up' has more \* than the entry"),
        (region(*ATTENTION, heads="no"), 2, r"heads='no'\): the number of heads is to be read there, and it is None"),
        (region(*ATTENTION, heads=5), 2, r"qkv has 36 outputs, which 5 heads and sections=\(1,\) do not make"),
        (region(*ATTENTION, heads=3, local=("dropout",)), 2, "local=.*and dropout is Dropout"),
        (region("block0.mlp", ("block0.norm1",)), 2, "block0.norm1 is a LayerNorm, and what is divided by columns"),
        (region("block0.mlp", ("block0.mlp.up",), "block0.norm2"), 2, "norm2 is a LayerNorm: what is divided by"),
        (mk.TensorPlan((), ("head.norm",)), 2, "head.norm' is a LayerNorm: an nn.Embedding has a vocabulary"),
        (mk.TensorPlan((), ("embedding.tokens",)), 21, "tp=21: embedding.tokens has 20 tokens"),
        (mk.TensorPlan((), head="head.norm"), 2, "head='head.norm' is a LayerNorm"),
        (mk.TensorPlan((), head="head.logits"), 21, "head.logits has 20 tokens"),
    ],
    ids=lambda value: None,
)  # fmt: skip
def test_what_cannot_be_divided(plan: mk.TensorPlan | None, t: int, says: str) -> None:
    model = GPT(**SIZES)
    with pytest.raises(ValueError, match=says):
        check(model, t, plan or mk.find_tensor_plan(model))


def test_what_else_cannot_be() -> None:
    model = GPT(**SIZES)
    with pytest.raises(ValueError, match="the model has 'block0' before 'block1'"):
        shard_model(
            copy.deepcopy(model),
            Pretended(2),
            mk.TensorPlan((), sequence=("block1", "block0")),
            sequence=True,
        )
    with pytest.raises(ValueError, match=r"does not say between which modules: TensorPlan\(..., sequence="):
        shard_model(copy.deepcopy(model), Pretended(2), mk.TensorPlan(()), sequence=True)
    shard_model(model, Pretended(3), sequence=True)
    with pytest.raises(ValueError, match=r"over 3 ranks, and.*shape \[1, 4, 12\]: pad it to 6, or take tp=2"):
        model(torch.zeros(1, 4, dtype=torch.long))
    mlp = MLP(2, 3, layers=2)
    with pytest.raises(ValueError, match="does not say between which modules"):
        shard_model(mlp, Pretended(2), sequence=True)
    with pytest.raises(ValueError, match="is several names, in a tuple"):
        mk.Region("a", "a.b")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="divides nothing"):
        mk.Region("a", ())
    with pytest.raises(ValueError, match="positive integers"):
        mk.Region("a", ("b",), sections=(0,))
    with pytest.raises(ValueError, match="is several names"):
        mk.TensorPlan((), "embedding")  # type: ignore[arg-type]
