"""Hooks, a __call__ of one's own and parametrizations: run as in plain PyTorch, or refused before a rank starts."""

import pickle
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from mpkit.strategies.packing.packing import dumps
from mpkit.strategies.prepare.checks import find_shared_memory
from mpkit.strategies.prepare.prepare import prepare
from tests.recipes import sgd
from tests.serial import EXACT, Train, same

torch.manual_seed(1)
DATA = [(torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)) for _ in range(2)]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    inner = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
    layers = [
        nn.Linear(4, 6), nn.Tanh(), nn.Sequential(*inner), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(),
        nn.Linear(6, 4),
    ]  # fmt: skip
    return nn.Sequential(*layers).double()


def scale(*values: Any) -> Any:
    """A forward hook, with keywords or not."""
    return values[-1] * 1.25


def scale_inputs(module: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    return (inputs[0] * 0.75,)


def double_all(module: nn.Module, *gradients: Any) -> Any:
    """A backward hook or pre-hook."""
    return tuple(None if g is None else g * 2 for g in gradients[0])


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


def parametrized() -> nn.Sequential:
    """In the new way and in the old one, which keeps a weight with its graph."""
    model = net()
    parametrizations.weight_norm(model[0])
    parametrize.register_parametrization(model[2][0], "weight", Symmetric())
    parametrizations.orthogonal(model[2][2])
    nn.utils.weight_norm(model[4])
    model(DATA[0][0])
    return model


PLANS = {"serial": mk.Plan.serial(), "gpipe": mk.Plan.gpipe(2, 2), "tp": mk.Plan.tp(2)}


def test_hooks_of_a_model_that_tensor_parallelism_divides(train: Train) -> None:
    """On the model, and on a block with whole regions in it."""

    def gpt() -> nn.Module:
        torch.manual_seed(0)
        model = GPT(layers=2, width=8, heads=2, length=6, vocab=12).double()
        model.register_forward_hook(scale)
        model.block0.register_forward_hook(scale)
        model.block1.mlp.register_forward_pre_hook(scale_inputs)
        return model

    tokens = torch.randint(12, (4, 6))
    how: dict[str, Any] = {"loss": next_token_loss, "optimizer": sgd, "steps": 2}
    one = train(gpt(), [(tokens, tokens)], mk.Plan.serial(), **how)
    two = train(gpt(), [(tokens, tokens)], mk.Plan.tp(2), **how)
    same(two, one.losses, one.state_dict(), **EXACT)


def prepared(model: nn.Module, kind: str, **how: Any) -> None:
    plan = PLANS[kind]
    how = {"data": DATA, "loss": F.mse_loss, "optimizer": sgd, "steps": 2, "ranks": plan.ranks} | how
    prepare(model, how.pop("data"), plan, **how)


def with_a(register: Callable[[nn.Sequential], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = net()
        register(model)
        return model

    return make


REFUSED: dict[str, tuple[Callable[[], nn.Module], list[str], str]] = {
    "a backward over stages": (with_a(lambda m: m.register_full_backward_hook(double_all)), ["gpipe"],
        r"cannot be cut: the full backward hook double_all of the model"),
    "a lock": (with_a(lambda m: setattr(m[2], "lock", threading.Lock())), ["tp"], r"The model's 2 cannot be copied"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.filterwarnings(
    "ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning"
)  # that is what is tried
def test_refused_by_name(what: str) -> None:
    make, kinds, words = REFUSED[what]
    for kind in kinds:
        with pytest.raises(ValueError) as caught:
            prepared(make(), kind)
        assert re.search(words, str(caught.value)), (kind, str(caught.value))


def test_hooks_on_all_modules_are_refused() -> None:
    handle = register_module_forward_hook(scale)
    try:
        with pytest.raises(
            ValueError, match=r"A hook on all modules \(scale, .*layer\.register_forward_hook\(hook\)"
        ):
            prepared(net(), "serial")
    finally:
        handle.remove()
    prepared(net(), "serial")


@pytest.mark.filterwarnings(
    "ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning"
)  # that is what is tried
def test_parametrized_modules_travel_by_pickle() -> None:
    model = parametrized()
    tied = nn.ModuleList([model, model[0]])
    first, layer = pickle.loads(dumps(tied))
    assert first[0] is layer and parametrize.is_parametrized(layer, "weight")
    assert isinstance(layer, nn.Linear) and type(layer).__name__ == "ParametrizedLinear"
    torch.testing.assert_close(first.state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(first(DATA[0][0]), model(DATA[0][0]), rtol=0, atol=0)
    layer.weight = torch.ones(6, 4).double()  # through the parametrization's inverse
    torch.testing.assert_close(layer.weight, torch.ones(6, 4).double())


# ---- Tensors of a model in the same memory: plain PyTorch updates both at once, and copies on ranks would not.


class Reads(nn.Module):
    """Sees its weight through a buffer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("rows", self.layer.weight.data[1:3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x) + x @ self.rows.T @ self.rows
        return made


def transposed() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data.t())
    return model


def test_views_of_one_memory_that_do_not_overlap_are_separate() -> None:
    """As flattened weights are; and frozen tensors may be seen twice, since nothing changes them."""
    flat, model = torch.randn(4, 8), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight, model[1].weight = (nn.Parameter(flat[:, i::2]) for i in range(2))
    assert find_shared_memory(model) is None
    frozen = transposed().requires_grad_(False)
    frozen[1].bias.requires_grad_(True)
    assert find_shared_memory(frozen) is None
    model[1].weight = model[0].weight
    assert find_shared_memory(model) is None, "one parameter in two places is a tie, which ranks keep"
    assert "the model are different tensors" in (find_shared_memory(Reads()) or "")
