"""Ingredients of random trainings: layers, hooks, losses, optimizers, data and plans that users really bring.

Each is a function of no or few arguments, named as it is drawn. Those in `ORDINARY` must train, under every plan;
the others may be refused. A rank imports this module, so it is light.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpkit as mk

WIDTH, CLASSES, BATCH = 6, 5, 8

# ---- layers: between two linear layers of WIDTH -------------------------------------------------------------------


class Fn(nn.Module):
    """A layer that is one function, of its input and of whether it trains."""

    def __init__(self, function: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.training)


class Residual(nn.Module):
    """A block that is no chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.norm(self.up(x))))


class Doubling(nn.Sequential):
    """A Sequential with a call of its own."""

    def __call__(self, x: Tensor) -> Any:
        return 2 * super().__call__(x)


class Backwards(nn.Sequential):
    """A Sequential whose forward is its own."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


class Frozen(nn.Module):
    """Holds a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Scale(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Mapped(nn.Sequential):
    """Maps its layer over samples."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = torch.vmap(self[0])(x)
        return made


class Replaced(nn.Sequential):
    """Calls its layer with other parameters than the layer has."""

    def forward(self, x: Tensor) -> Tensor:
        doubled = {name: 2 * p for name, p in self[0].named_parameters()}
        made: Tensor = torch.func.functional_call(self[0], doubled, (x,))
        return made


class Slope(nn.Sequential):
    """Computes gradients of its layer in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_() if not x.requires_grad else x
        (slope,) = torch.autograd.grad(self[0](x).square().sum(), x, create_graph=True)
        return slope


class Clamped(nn.Linear):
    """Writes into its weight."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.3, 0.3)
        return super().forward(x)


class Codebook(nn.Module):
    """Rounds samples to the nearest of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rows[torch.cdist(x.detach(), self.rows.detach()).argmin(1)]


class Empty(nn.Linear):
    """Has a parameter without elements."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.nothing.sum()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "group norm": lambda: nn.GroupNorm(2, WIDTH),
    "residual": Residual,
    "nested": lambda: nn.Sequential(nn.Linear(WIDTH, 7), nn.ReLU(inplace=True), nn.Linear(7, WIDTH)),
    "frozen": Frozen,
    "scale": Scale,
    "no dropout": lambda: nn.Dropout(0.0),
    "own forward": lambda: Backwards(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "own call": lambda: Doubling(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "batch mean": lambda: Fn(lambda x, _: x - 0.3 * x.mean(0, keepdim=True)),
    "batch mean in training": lambda: Fn(lambda x, training: x / (1 + x.std()) if training else x),
    "flip": lambda: Fn(lambda x, _: x + 0.5 * x.flip(0)),
    "by length": lambda: Fn(lambda x, _: x * (len(x) / 4)),
    "attention over samples": lambda: Fn(lambda x, _: torch.softmax(x @ x.T, dim=1) @ x),
    "spectrum": lambda: Fn(lambda x, _: torch.fft.fft(x, dim=-1).real / WIDTH),
    "mapped": lambda: Mapped(nn.Linear(WIDTH, WIDTH)),
    "replaced": lambda: Replaced(nn.Linear(WIDTH, WIDTH)),
    "slope": lambda: Slope(nn.Linear(WIDTH, WIDTH)),
    "clamped": lambda: Clamped(WIDTH, WIDTH),
    "codebook": Codebook,
    "empty": Empty,
}

RANDOM: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.3),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 2, 3, padding=1), nn.Flatten(), nn.GELU()
    ),
    "dropped attention": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.TransformerEncoderLayer(3, 1, 6, batch_first=True), nn.Flatten()
    ),
}
"""Ordinary ones of which some draw at random, so that plain PyTorch draws other numbers."""

# ---- hooks: what they do to a model of `nn.Sequential` ------------------------------------------------------------


def _after_accumulation(model: nn.Sequential) -> None:
    def scale(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    list(model.parameters())[-1].register_post_accumulate_grad_hook(scale)


def _replaced(model: nn.Sequential) -> None:
    linear = model[0]
    model[0].forward = lambda x: F.linear(x, linear.weight) * 0.5  # type: ignore[method-assign]


HOOKS: dict[str, Callable[[nn.Sequential], Any]] = {
    "none": lambda model: None,
    "forward, root": lambda model: model.register_forward_hook(lambda module, args, out: out * 2),
    "forward, inner": lambda model: model[1].register_forward_hook(lambda module, args, out: out + 1),
    "before, root": lambda model: model.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,)),
    "before, inner": lambda model: model[2].register_forward_pre_hook(lambda module, args: (args[0] - 0.1,)),
    "backward, inner": lambda model: model[2].register_full_backward_hook(lambda module, i, out: (i[0] * 3,)),
    "before backward, root": lambda model: model.register_full_backward_pre_hook(
        lambda m, out: (out[0] * 0.5,)
    ),
    "parameter": lambda model: next(model.parameters()).register_hook(lambda grad: grad * 3),
    "after accumulation": _after_accumulation,
    "forward, batch": lambda model: model[1].register_forward_hook(lambda m, args, out: out - out.mean(0)),
    "forward replaced": _replaced,
}

# ---- losses: of outputs [batch, CLASSES] and targets, whole numbers below CLASSES, some of them -100 --------------

CLASS_WEIGHT = torch.linspace(0.2, 2.0, CLASSES, dtype=torch.float64)


def one_hot(targets: Tensor, like: Tensor) -> Tensor:
    """Return [batch, CLASSES] of 0 and 1, in the dtype of outputs; a masked target's row is 0."""
    return (targets[:, None] == torch.arange(CLASSES, device=targets.device)).to(like)


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, one_hot(targets, outputs))


def _rows(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    valid = targets >= 0
    each = F.cross_entropy(outputs, targets.clamp(min=0), reduction="none")
    return (each * valid).sum(), valid.sum()


def _masked_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    total, count = _rows(outputs, targets)
    return total / count


def _contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs), device=outputs.device))


LOSSES: dict[str, Callable[[], Callable[[Tensor, Tensor], Any]]] = {
    "mse": lambda: mse,
    "huber": lambda: lambda o, t: F.huber_loss(o, one_hot(t, o), delta=0.3),
    "kl, batchmean": lambda: lambda o, t: F.kl_div(o.log_softmax(1), one_hot(t, o), reduction="batchmean"),
    "cross entropy": lambda: F.cross_entropy,
    "nn.CrossEntropyLoss": lambda: nn.CrossEntropyLoss(),
    "smoothed": lambda: nn.CrossEntropyLoss(label_smoothing=0.1),
    "class weights": lambda: nn.CrossEntropyLoss(weight=CLASS_WEIGHT),
    "class weights in a lambda": lambda: lambda o, t: F.cross_entropy(o, t, weight=CLASS_WEIGHT.to(o)),
    "cross entropy in a lambda": lambda: lambda o, t: F.cross_entropy(o, t),
    "masked mean": lambda: _masked_mean,
    "(total, count)": lambda: _rows,
    "mean_loss": lambda: mk.mean_loss(F.cross_entropy),
    "mean_loss, weights": lambda: mk.mean_loss(nn.CrossEntropyLoss(CLASS_WEIGHT)),
    "sum": lambda: lambda o, t: F.mse_loss(o, one_hot(t, o), reduction="sum"),
    "root of the mean": lambda: lambda o, t: mse(o, t).sqrt(),
    "with deviation": lambda: lambda o, t: mse(o, t) + 0.1 * o.std(),
    "largest": lambda: lambda o, t: mse(o, t) + 0.1 * o.max(),
    "by length": lambda: lambda o, t: mse(o, t) * len(o),
    "contrastive": lambda: _contrastive,
    "whole_batch_loss": lambda: mk.whole_batch_loss(_contrastive),
    "not a number": lambda: lambda o, t: mse(o, t) * float("nan"),
}

# ---- optimizers: of parameters, or of named ones ------------------------------------------------------------------


class Clipping(torch.optim.SGD):
    """Clips all gradients by their common norm."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        return super().step(closure)


class TrustRatio(torch.optim.SGD):
    """Scales each parameter's step by its norm, as LARS does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(p.norm() / (p.grad.norm() + 1e-3))
        return super().step(closure)


class Coupled(torch.optim.SGD):
    """A step's size depends on how many parameters there are."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(len(group["params"]))
        return super().step(closure)


def _by_dimensions(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.AdamW(
        [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-2},
        ],
        lr=1e-2, eps=1e-6,
    )  # fmt: skip


def _first_apart(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.SGD([{"params": params[:1], "lr": 0.3}, {"params": params[1:]}], lr=0.05)


def _by_size(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.SGD([{"params": [p], "lr": 1.0 / p.numel()} for p in params], lr=0.1)


def _by_name(named: Any) -> torch.optim.Optimizer:
    named = list(named)
    return torch.optim.SGD(
        [
            {"params": [p for n, p in named if n.endswith("bias")], "lr": 0.3},
            {"params": [p for n, p in named if not n.endswith("bias")]},
        ],
        lr=0.05,
    )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-6),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, eps=1e-6),
    "by dimensions": _by_dimensions,
    "first apart": _first_apart,
    "last only": lambda params: torch.optim.SGD(list(params)[-1:], lr=0.1),
    "by number": lambda params: torch.optim.SGD((ps := list(params)), lr=0.5 / len(ps)),
    "by size": _by_size,
    "by name": _by_name,
    "clipping": lambda params: Clipping(params, lr=0.1),
    "trust ratio": lambda params: TrustRatio(params, lr=0.1),
    "coupled": lambda params: Coupled(params, lr=0.1),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
}

# ---- data: of (inputs, targets), whole batches --------------------------------------------------------------------

Pairs = list[tuple[Tensor, Tensor]]


class _Stream(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self.pairs


DATA: dict[str, Callable[[Pairs], Any]] = {
    "list": lambda pairs: pairs,
    "generator": lambda pairs: (pair for pair in pairs),
    "stream": _Stream,
    "loader": lambda pairs: torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])),
        batch_size=BATCH,
    ),
}

# ---- plans --------------------------------------------------------------------------------------------------------

PLANS: dict[str, Callable[[], mk.Plan]] = {
    "serial": mk.Plan.serial,
    "serial, 4": lambda: mk.Plan.serial(4),
    "ddp": lambda: mk.Plan.ddp(2),
    "ddp, 2": lambda: mk.Plan.ddp(2, microbatches=2),
    "dp": lambda: mk.Plan.dp(2),
    "zero 1": lambda: mk.Plan.zero(1, 2),
    "zero 2": lambda: mk.Plan.zero(2, 2),
    "zero 3": lambda: mk.Plan.zero(3, 2),
    "naive": lambda: mk.Plan.naive_mp(2),
    "gpipe": lambda: mk.Plan.gpipe(2, 4),
    "1f1b": lambda: mk.Plan.pipeline("1f1b", 2, 3),
    "zb_h1": lambda: mk.Plan.pipeline("zb_h1", 2, 4),
    "pp x dp": lambda: mk.Plan(pp=2, dp=2, schedule="1f1b", microbatches=2),
    "pp x zero 1": lambda: mk.Plan(pp=2, dp=2, zero=1, schedule="1f1b", microbatches=2),
}

ORDINARY = {
    "tanh", "layer norm", "group norm", "residual", "nested", "frozen", "scale", "no dropout", "own forward",
    "none", "mse", "huber", "kl, batchmean", "cross entropy", "nn.CrossEntropyLoss", "smoothed", "class weights",
    "(total, count)", "mean_loss", "mean_loss, weights", "not a number",
    "sgd", "momentum", "adamw", "adagrad", "by dimensions", "first apart", "last only", "by number", "by size",
    "by name", "list", "generator", "stream", "loader",
}  # fmt: skip
"""What every plan trains."""
