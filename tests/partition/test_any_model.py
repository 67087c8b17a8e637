"""Models as people have them, cut over ranks without being rewritten: training equals serial training.

Transformers' models are built from small configs, nothing is downloaded. Serial training is plain PyTorch.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.launch.session.run import Run
from mpkit.models import UNet
from mpkit.trace import Kind
from tests.recipes import adamw, normal, sgd
from tests.serial import Train, check_equal


def ways(run: Run) -> set[str]:
    """From which stage's rank to which something goes forward, as "0>3"."""
    names = [
        part.names[op["group"]] for part in run.trace.ranks for op in part.ops if op["kind"] == Kind.SEND
    ]
    return {name.split("#")[0] for name in names if name.split("#")[1][0] in "FS"}


def next_word(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def gpt2(**changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_layer": 4, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**(small | no_dropout | ends | changes))).double()


@pytest.mark.slow
def test_a_transformer_equals_serial_training(train: Train) -> None:
    """Batches of 5 in 4 micro-batches, of another length in the second step. The zoo has other architectures."""
    torch.manual_seed(1)
    data = []
    for length in (8, 6):
        mask = (torch.arange(length) < torch.tensor([length, 3, 4, 1, 2])[:, None]).long()
        inputs = {"input_ids": torch.randint(32, (5, length)), "attention_mask": mask}
        data.append((inputs, torch.randint(32, (5, length))))
    plan = mk.Plan(pp=2, schedule="zbv", microbatches=4, virtual_stages=2)
    how: dict[str, Any] = {"loss": next_word, "optimizer": adamw, "steps": 5, "max_grad_norm": 0.5}
    check_equal(train, gpt2(), data, plan, **how)


def test_a_unet_whose_skips_go_directly_where_they_are_needed(train: Train) -> None:
    torch.manual_seed(2)
    model = UNet(1, 2, width=4).double()
    data = [(normal(3, 1, 16, 8), torch.randint(2, (3, 16, 8)))]
    how: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": adamw, "steps": 5}
    run = check_equal(train, model, data, mk.Plan.gpipe(4, 3), **how)
    assert ways(run) == {"0>1", "0>2", "0>3", "1>2", "2>3"}
    held = [memory["params"] for memory in run.timeline().peak_memory]
    assert sum(held) == sum(
        parameter.nbytes for parameter in model.parameters()
    )  # each weight on one rank only
    assert min(held) > 0


class Parts(NamedTuple):
    x: Tensor
    scale: float
    mask: Tensor | None


@dataclass
class Thing:
    x: Tensor
    names: list[str]


class Odd(nn.Module):
    """Blocks that give each other tuples, dicts, dataclasses, None, numbers, masks, and tensors without gradients."""

    class A(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Parts:
            y = self.linear(x)
            return Parts(y, 0.5, y > 0)

    class B(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, parts: Parts, *, again: Tensor | None = None) -> dict[str, Any]:
            assert again is None and parts.mask is not None
            y = self.linear(parts.x) * parts.mask * parts.scale
            return {"y": y, "count": (y > 0).sum(1), "none": None, "all": [y.sin(), (1, "b", y.detach())]}

    class C(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, given: dict[str, Any], parts: Parts) -> Thing:
            assert given["none"] is None and given["all"][1][:2] == (1, "b")
            x = self.linear(given["y"] + given["all"][0]) + given["all"][1][2]
            return Thing(x * given["count"][:, None] + parts.x, ["x", "names"])

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = self.A(), self.B(), self.C(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Thing:
        parts = self.a(x)
        given = self.b(parts, again=parts.mask if x.shape[0] > 100 else None)
        thing = self.c(given, parts)
        assert thing.names == ["x", "names"]
        return Thing(self.head(thing.x), thing.names)


def of_thing(thing: Thing, targets: Tensor) -> Tensor:
    return F.mse_loss(thing.x, targets)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_whatever_goes_from_block_to_block(train: Train, recompute: str) -> None:
    torch.manual_seed(4)
    data = [(normal(5, 3), normal(5, 2)), (normal(4, 3), normal(4, 2))]
    plan = mk.Plan.gpipe(4, 2, recompute=recompute, cut=["b", "c", "head"])
    check_equal(train, Odd().double(), data, plan, loss=of_thing, optimizer=adamw, steps=5)


class Named(nn.Linear):
    def forward(self, x: Any) -> Any:  # type: ignore[override]
        return {"x": super().forward(x["x"] if isinstance(x, dict) else x)}


def test_a_chain_whose_layers_hand_on_dicts(train: Train) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(Named(3, 4), Named(4, 4), Named(4, 2)).double()
    data = [(normal(4, 3), normal(4, 2))]
    how: dict[str, Any] = {"loss": lambda out, y: F.mse_loss(out["x"], y), "optimizer": adamw, "steps": 2}
    check_equal(train, model, data, mk.Plan.gpipe(2, 2, cut=[1]), **how)


class Flow(nn.Module):
    """Control flow: on an input's values before the blocks, on a tensor's values within one."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
            y = self.linear(x)
            if y.sum().item() > 0:
                y = -y.cos()
            return y if mask is None else y * mask

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Gate() for _ in range(4)])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        given = None if mask.all() else mask
        for block in self.blocks:
            x = x + block(x, given)
        return x


class Chooses(nn.Module):
    """Goes one way or another by what a block made: between blocks, where nobody but one rank can know."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(y) if y.mean() > 0 else self.b(-y)


class Around(nn.Module):
    """Has that within; and a list of layers, too short for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Chooses(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


class Remembers(nn.Module):
    """A block leaves a tensor in an attribute, and another one takes it there."""

    class Leave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, store: dict[str, Tensor]) -> Tensor:
            store["left"] = self.linear(x)
            return store["left"] * 2

    class Take(Leave):
        def forward(self, x: Tensor, store: dict[str, Tensor]) -> Tensor:
            return self.linear(x) + Remembers.left(store)

    @staticmethod
    def left(store: dict[str, Tensor]) -> Tensor:
        return store["left"]

    def __init__(self) -> None:
        super().__init__()
        self.leave, self.take = self.Leave(), self.Take()

    def forward(self, x: Tensor) -> Tensor:
        store = Store()
        return self.take(self.leave(x, store), store)


class Store(dict[str, Tensor]):
    """What a walk cannot look into."""


class Kept(nn.Module):
    """A hook within a block keeps a tensor, which the model then uses itself."""

    def __init__(self, hands_on: bool) -> None:
        super().__init__()
        self.a, self.b, self.hands_on = Odd.A(), nn.Linear(4, 4), hands_on
        self.a.linear.register_forward_hook(self.keep)

    def keep(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        self.kept = output

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.a(x[:, :3]).x, self.__dict__.pop("kept")
        return self.b(y * z) if self.hands_on else self.b(y) + torch.sin(z)


class OutOfSight(nn.Module):
    """Calls a block out of sight, from an autograd function."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Calling.apply(self.b, self.a(x))
        return y


class Calling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = block(x)
        return y

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[None, Tensor]:
        return None, d


class TwiceNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(self.norm(x))))


IMPOSSIBLE: dict[str, tuple[nn.Module, mk.Plan, str]] = {
    "a way chosen between blocks": (
        Chooses(),
        mk.Plan.gpipe(2, 2),
        r"The model \(Chooses\) cannot be cut: .*looks at the numbers of a tensor that a block made.*module of its own",
    ),
    "such a module within": (Around(), mk.Plan.gpipe(3, 2),
        r"3 stages, but the model has 2 layers \(inner, head\).*inner is cut nowhere within: .*looks at the numbers"),
    "a tensor handed over unseen": (Remembers(), mk.Plan.gpipe(2, 2),
        "a tensor that leave made is read without having been handed over"),
    "a tensor kept by a hook": (
        Kept(False), mk.Plan.gpipe(2, 2, cut=["b"]), "sin is given a tensor that a made and did not return",
    ),
    "a tensor kept by a hook, handed on": (
        Kept(True), mk.Plan.gpipe(2, 2, cut=["b"]), "mul is given a tensor that a made and did not return",
    ),
    "a block called by an autograd function": (OutOfSight(), mk.Plan.gpipe(2, 2),
        "between its blocks, Calling computes with b.weight, which it is not given"),
    "statistics in two stages": (TwiceNormed(), mk.Plan.gpipe(2, 1, cut=["a"]),
        "norm is called in the stages 0, 1, and keeps running_mean"),
    "a cut at a block that is not there": (Flow(), mk.Plan.gpipe(2, 2, cut=["block.2"]),
        r"cut at 'block.2': the model has no layer of that name. Did you mean 'blocks.2'"),
    "more stages than blocks": (Flow(), mk.Plan.gpipe(5, 2), "5 stages, but the model has 4 layers"),
}  # fmt: skip


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_what_cannot_be_cut_says_where_and_why(train: Train, kind: str) -> None:
    model, plan, words = IMPOSSIBLE[kind]
    inputs = (torch.randn(4, 4), torch.ones(4, 4)) if isinstance(model, Flow) else torch.randn(4, 4)
    with pytest.raises(ValueError, match=words):
        train(model, [(inputs, torch.randn(4, 4))], plan, loss=F.mse_loss, optimizer=sgd, steps=1)


class Unsteady(nn.Module):
    """Another way than in the dry run, in the second batch."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, how: str) -> Any:
            y = self.linear(x)
            if how == "constant":
                return y, int((x > 100).sum())
            if how == "structure":
                return (y, None) if (x < 100).all() else [y, None]
            return (y[y.sum(1) < 1000], None) if how == "shape" else (y, None)

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.blocks = how, nn.ModuleList([self.Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        large = bool((x > 100).any())
        y = x
        for block in self.blocks:
            y, _ = block(y, self.how)
        if self.how == "operation" and large:
            y = y.sin()
        return self.blocks[0](y, self.how)[0] if self.how == "block" and large else y


UNSTEADY = {
    "constant": "blocks.0 gave back 1, and 0 in the dry run",
    "structure": "blocks.0 made something of another structure",
    "shape": r"blocks.0 made \[1, 4\] float32, and \[2, 4\] float32 in the dry run",
    "operation": "sin happened instead of the end",
    "block": "blocks.0 happened instead of the end",
}


@pytest.mark.parametrize("how", UNSTEADY)
def test_a_forward_that_goes_another_way_is_told_of(train: Train, how: str) -> None:
    torch.manual_seed(10)
    model = Unsteady(how)
    large = torch.randn(2, 4)
    large[0, 0] = 1e6
    with torch.no_grad():
        model.blocks[0].linear.weight.fill_(1.0)
    data = [(torch.randn(2, 4), torch.randn(2, 4)), (large, torch.randn(2, 4))]
    with pytest.raises(mk.RankFailed, match="another way than in its dry run") as caught:
        train(model, data, mk.Plan.gpipe(2, 1), loss=F.mse_loss, optimizer=sgd, steps=2)
    assert re.search(UNSTEADY[how], str(caught.value))
    assert caught.value.step == 1
