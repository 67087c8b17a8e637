"""Plans of tensor parallelism: which are found, what they leave on a rank, and what is said of what cannot be."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.models import GPT, MLP
from mpkit.strategies.comm.fake_group import FakeGroup
from mpkit.strategies.tensor import check, shard_model
from tests.recipes import sgd
from tests.serial import Clusters, Train
from tests.zoo.architectures import ARCHITECTURES, build

SIZES: dict[str, Any] = {"layers": 2, "width": 12, "heads": 3, "vocab": 20, "length": 6}


def test_partial_gradients_are_those_of_what_works_on_a_part() -> None:
    model = GPT(**SIZES | {"layers": 1})
    assert shard_model(copy.deepcopy(model), FakeGroup(2)).partial == frozenset()
    found = shard_model(copy.deepcopy(model), FakeGroup(2), sequence=True).partial
    names = ["norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "attention.out.bias", "mlp.out.bias"]
    assert found == {"head.norm.weight", "head.norm.bias", *(f"block0.{name}" for name in names)}


def test_tied_weights_stay_tied_and_are_sharded_alike() -> None:
    model = GPT(**SIZES)
    model.head.logits.weight = model.embedding.tokens.weight
    sharded = shard_model(model, FakeGroup(3, 1))
    assert model.head.logits.weight is model.embedding.tokens.weight
    tied = [sharded.shards[name] for name in ("head.logits.weight", "embedding.tokens.weight")]
    assert tied[0] == tied[1] and tied[0].ranges == (range(7, 14),)
    both = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    both[2].weight = both[0].weight
    with pytest.raises(ValueError, match=r"weight is divided in two ways.*0.weight and 2.weight"):
        shard_model(both, FakeGroup(2))


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


def unknown_on_a_rank(ctx: Any, model: nn.Module, plan: mk.tensor.TensorPlan, x: Tensor) -> Tensor:
    return mk.tensor_parallel(model, plan)(x)


def test_an_unknown_model_gets_a_plan_to_paste(clusters: Clusters) -> None:
    model, x = Unknown().double(), torch.randint(5, (3,))
    with pytest.raises(ValueError, match="No TensorPlan is known for Unknown") as caught:
        mk.tensor.find_tensor_plan(model)
    said = str(caught.value)
    pasted = said[said.index("mk.tensor.TensorPlan(") : said.index("\nWhere one layer")]
    assert "mk.tensor.Region('layers.*', column=('layers.*',))" in pasted
    plan = eval(pasted, {"mk": mk})
    for found in clusters(2).run(unknown_on_a_rank, model, plan, x):
        torch.testing.assert_close(found.detach(), model(x).detach())
    half = mk.tensor.TensorPlan((mk.tensor.Region("last", ("last",)),))
    with pytest.raises(
        ValueError, match=r"words.weight is the same.* as last's.*embeddings=\('words',\) does"
    ):
        shard_model(model, FakeGroup(2), half)
    with pytest.raises(ValueError, match="divides linear layers, and LayerNorm has none"):
        mk.tensor.find_tensor_plan(nn.LayerNorm(3))


def region(*args: Any, **kwargs: Any) -> mk.tensor.TensorPlan:
    return mk.tensor.TensorPlan((mk.tensor.Region(*args, **kwargs),))


ATTENTION = ("block*.attention", ("block*.attention.qkv",), "block*.attention.out")


@pytest.mark.parametrize("plan, t, says", [
    (None, 4, r"tp=4: block0.attention has 3 heads.*each rank takes at least one: tp=3 is the most"),
    (region("block*.atention", ("a",)), 2, r"no module of the name 'block\*.atention'. It has 'block"),
    (region("block0.mlp", ("block0.mlp.down",)), 2, r"no module of the name 'block0.mlp.down'"),
    (region("block0.mlp", ("block*.mlp.up",)), 2, r"'block\*.mlp.up' has more \* than the entry"),
    (region(*ATTENTION, heads="no"), 2, r"heads='no'\): the number of heads is to be read there, and it is None"),
    (region(*ATTENTION, heads=5), 2, r"qkv has 36 outputs, which 5 heads and sections=\(1,\) do not make"),
    (region(*ATTENTION, heads=3, local=("dropout",)), 2, "local=.*and dropout is Dropout"),
    (region("block0.mlp", ("block0.norm1",)), 2, "block0.norm1 is a LayerNorm, and what is divided by columns"),
    (region("block0.mlp", ("block0.mlp.up",), "block0.norm2"), 2, "norm2 is a LayerNorm: what is divided by"),
    (mk.tensor.TensorPlan((), ("head.norm",)), 2, "head.norm' is a LayerNorm: an nn.Embedding has a vocabulary"),
    (mk.tensor.TensorPlan((), ("embedding.tokens",)), 21, "tp=21: embedding.tokens has 20 tokens"),
    (mk.tensor.TensorPlan((), head="head.norm"), 2, "head='head.norm' is a LayerNorm"),
    (mk.tensor.TensorPlan((), head="head.logits"), 21, "head.logits has 20 tokens"),
], ids=lambda value: None)  # fmt: skip
def test_what_cannot_be_divided(plan: mk.tensor.TensorPlan | None, t: int, says: str) -> None:
    model = GPT(**SIZES)
    with pytest.raises(ValueError, match=says):
        check(model, t, plan or mk.tensor.find_tensor_plan(model))


def test_what_else_cannot_be() -> None:
    model = GPT(**SIZES)
    with pytest.raises(ValueError, match="the model has 'block0' before 'block1'"):
        shard_model(
            copy.deepcopy(model), FakeGroup(2), mk.tensor.TensorPlan((), sequence=("block1", "block0")),
            sequence=True,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"does not say between which modules: TensorPlan\(..., sequence="):
        shard_model(copy.deepcopy(model), FakeGroup(2), mk.tensor.TensorPlan(()), sequence=True)
    shard_model(model, FakeGroup(3), sequence=True)
    with pytest.raises(ValueError, match=r"over 3 ranks, and.*shape \[1, 4, 12\]: pad it to 6, or take tp=2"):
        model(torch.zeros(1, 4, dtype=torch.long))
    mlp = MLP(2, 3, layers=2)
    with pytest.raises(ValueError, match="does not say between which modules"):
        shard_model(mlp, FakeGroup(2), sequence=True)
    with pytest.raises(ValueError, match="is several names, in a tuple"):
        mk.tensor.Region("a", "a.b")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="divides nothing"):
        mk.tensor.Region("a", ())
    with pytest.raises(ValueError, match="positive integers"):
        mk.tensor.Region("a", ("b",), sections=(0,))
    with pytest.raises(ValueError, match="is several names"):
        mk.tensor.TensorPlan((), "embedding")  # type: ignore[arg-type]


ZOO = {one.name: one for one in ARCHITECTURES}


def test_a_parameter_of_which_the_plan_says_nothing_is_refused() -> None:
    # Its gradients may be partial sums or whole: nobody knows.
    model: Any = build(ZOO["qwen3"])
    del model._tp_plan["model.layers.*.self_attn.q_norm"]
    with pytest.raises(
        ValueError, match=r"does not say what becomes of model.layers.0.self_attn.q_norm.weight"
    ):
        mk.tensor.find_tensor_plan(model)


class Residual(nn.Module):
    """What it adds to its input is inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def attention_without_sections() -> tuple[nn.Module, mk.tensor.TensorPlan]:
    model = GPT(**SIZES | {"layers": 1, "heads": 2})
    plan = mk.tensor.find_tensor_plan(model)
    attention, mlp = plan.regions
    return model, replace(plan, regions=(replace(attention, sections=(1,)), mlp))


def residual_inside() -> tuple[nn.Module, mk.tensor.TensorPlan]:
    return nn.Sequential(nn.Linear(4, 4), Residual()), region("1", ("1.up",), "1.down")


def norms_of_each_head() -> tuple[nn.Module, None]:
    stablelm = ZOO["stablelm"]
    return build(replace(stablelm, settings=stablelm.settings | {"qk_layernorm": True})), None


def mean_of_words(outputs: Any, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(getattr(outputs, "logits", outputs).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(("make", "says"), [
    (attention_without_sections, "fused projections take sections"),
    (residual_inside, "does not compute what it computes whole"),
    (norms_of_each_head, "does not compute what it computes whole"),
])  # fmt: skip
def test_a_plan_by_which_the_model_computes_something_else_is_stopped(
    train: Train, make: Any, says: str
) -> None:
    torch.manual_seed(9)
    model, plan = make()
    batch: Any = torch.randint(20, (4, 6)), torch.randint(20, (4, 6))
    loss: Any = mean_of_words
    if type(model) is nn.Sequential:
        batch, loss = (torch.randn(4, 4), torch.randn(4, 4)), nn.functional.mse_loss
    with pytest.raises(mk.errors.NotSerial, match=f"step 1 is not that of serial training.*{says}"):
        train(model, [batch], mk.Plan(tp=2, tensor=plan), loss=loss, optimizer=sgd, steps=1)
