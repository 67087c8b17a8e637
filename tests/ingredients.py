"""Ingredients of random trainings: layers, hooks, losses, optimizers, data and plans that users really bring.

Each is a function of no or few arguments, named as it is drawn. Those in `ORDINARY` must train, under every plan;
the others may be refused. A rank imports this module, so it is light.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpkit as mk

__all__ = ["DATA", "HOOKS", "LAYERS", "LOSSES", "OPTIMIZERS", "ORDINARY", "PLANS", "WIDTH"]

WIDTH, CLASSES, BATCH = 6, 5, 8

# ---- layers: between two linear layers of WIDTH -------------------------------------------------------------------


class BatchMean(nn.Module):
    """Looks at the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        """Subtract the batch's mean."""
        return x - 0.3 * x.mean(0, keepdim=True)


class BatchMeanInTraining(nn.Module):
    """Looks at the whole batch, in train mode only."""

    def forward(self, x: Tensor) -> Tensor:
        """Divide by the batch's standard deviation while training."""
        return x / (1 + x.std()) if self.training else x


class Flip(nn.Module):
    """Mixes samples."""

    def forward(self, x: Tensor) -> Tensor:
        """Add each sample's mirror image in the batch."""
        return x + 0.5 * x.flip(0)


class ByLength(nn.Module):
    """Knows how many samples there are."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale by the number of samples."""
        return x * (len(x) / 4)


class Attention(nn.Module):
    """A softmax over samples."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend to all samples of the batch."""
        return torch.softmax(x @ x.T, dim=1) @ x


class Residual(nn.Module):
    """A block that is no chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add to the input."""
        return x + self.down(torch.relu(self.norm(self.up(x))))


class Doubling(nn.Sequential):
    """A Sequential with a call of its own."""

    def __call__(self, x: Tensor) -> Any:
        """Double what the layers give."""
        return 2 * super().__call__(x)


class Backwards(nn.Sequential):
    """A Sequential whose forward is its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Call the layers from last to first."""
        for layer in reversed(self):
            x = layer(x)
        return x


class Frozen(nn.Module):
    """Holds a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shift."""
        return x + self.shift


class Scale(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        """Scale."""
        return x * self.scale


class Spectrum(nn.Module):
    """Is complex inside."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the real part of the Fourier transform."""
        return torch.fft.fft(x, dim=-1).real / WIDTH


class Mapped(nn.Sequential):
    """Maps its layer over samples."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute a sample at a time."""
        made: Tensor = torch.vmap(self[0])(x)
        return made


class Replaced(nn.Sequential):
    """Calls its layer with other parameters than the layer has."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute with all parameters doubled."""
        doubled = {name: 2 * p for name, p in self[0].named_parameters()}
        made: Tensor = torch.func.functional_call(self[0], doubled, (x,))
        return made


class Slope(nn.Sequential):
    """Computes gradients of its layer in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the gradient of the layer's squares at x."""
        x = x.detach().requires_grad_() if not x.requires_grad else x
        (slope,) = torch.autograd.grad(self[0](x).square().sum(), x, create_graph=True)
        return slope


class Clamped(nn.Linear):
    """Writes into its weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Keep the weight small first."""
        with torch.no_grad():
            self.weight.clamp_(-0.3, 0.3)
        return super().forward(x)


class Codebook(nn.Module):
    """Rounds samples to the nearest of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Add the nearest row."""
        return x + self.rows[torch.cdist(x.detach(), self.rows.detach()).argmin(1)]


class Empty(nn.Linear):
    """Has a parameter without elements."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        """Use it all the same."""
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
    "batch mean": BatchMean,
    "batch mean in training": BatchMeanInTraining,
    "flip": Flip,
    "by length": ByLength,
    "attention over samples": Attention,
    "spectrum": Spectrum,
    "mapped": lambda: Mapped(nn.Linear(WIDTH, WIDTH)),
    "replaced": lambda: Replaced(nn.Linear(WIDTH, WIDTH)),
    "slope": lambda: Slope(nn.Linear(WIDTH, WIDTH)),
    "clamped": lambda: Clamped(WIDTH, WIDTH),
    "codebook": Codebook,
    "empty": Empty,
}

# ---- hooks: what they do to a model of `nn.Sequential` ------------------------------------------------------------


def _none(model: nn.Sequential) -> None:
    """Leave the model as it is."""


def _on_root(model: nn.Sequential) -> None:
    model.register_forward_hook(lambda module, args, out: out * 2)


def _on_inner(model: nn.Sequential) -> None:
    model[1].register_forward_hook(lambda module, args, out: out + 1)


def _before_root(model: nn.Sequential) -> None:
    model.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


def _before_inner(model: nn.Sequential) -> None:
    model[2].register_forward_pre_hook(lambda module, args: (args[0] - 0.1,))


def _backward(model: nn.Sequential) -> None:
    model[2].register_full_backward_hook(lambda module, into, out: (into[0] * 3,))


def _backward_before(model: nn.Sequential) -> None:
    model.register_full_backward_pre_hook(lambda module, out: (out[0] * 0.5,))


def _on_parameter(model: nn.Sequential) -> None:
    next(model.parameters()).register_hook(lambda grad: grad * 3)


def _after_accumulation(model: nn.Sequential) -> None:
    def scale(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    list(model.parameters())[-1].register_post_accumulate_grad_hook(scale)


def _on_batch(model: nn.Sequential) -> None:
    model[1].register_forward_hook(lambda module, args, out: out - out.mean(0))


def _replaced(model: nn.Sequential) -> None:
    linear = model[0]
    model[0].forward = lambda x: F.linear(x, linear.weight) * 0.5  # type: ignore[method-assign]


HOOKS: dict[str, Callable[[nn.Sequential], None]] = {
    "none": _none,
    "forward, root": _on_root,
    "forward, inner": _on_inner,
    "before, root": _before_root,
    "before, inner": _before_inner,
    "backward, inner": _backward,
    "before backward, root": _backward_before,
    "parameter": _on_parameter,
    "after accumulation": _after_accumulation,
    "forward, batch": _on_batch,
    "forward replaced": _replaced,
}

# ---- losses: of outputs [batch, CLASSES] and targets, whole numbers below CLASSES, some of them -100 --------------

CLASS_WEIGHT = torch.linspace(0.2, 2.0, CLASSES, dtype=torch.float64)


def one_hot(targets: Tensor) -> Tensor:
    """Return [batch, CLASSES] of 0 and 1; a masked target's row is 0."""
    return (targets[:, None] == torch.arange(CLASSES)).to(torch.float64)


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean square."""
    return F.mse_loss(outputs, one_hot(targets))


def _rows(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    valid = targets >= 0
    each = F.cross_entropy(outputs, targets.clamp(min=0), reduction="none")
    return (each * valid).sum(), valid.sum()


def _masked_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    total, count = _rows(outputs, targets)
    return total / count


def _contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


LOSSES: dict[str, Callable[[], Callable[[Tensor, Tensor], Any]]] = {
    "mse": lambda: mse,
    "huber": lambda: lambda o, t: F.huber_loss(o, one_hot(t), delta=0.3),
    "kl, batchmean": lambda: lambda o, t: F.kl_div(o.log_softmax(1), one_hot(t), reduction="batchmean"),
    "cross entropy": lambda: F.cross_entropy,
    "nn.CrossEntropyLoss": lambda: nn.CrossEntropyLoss(),
    "smoothed": lambda: nn.CrossEntropyLoss(label_smoothing=0.1),
    "class weights": lambda: nn.CrossEntropyLoss(weight=CLASS_WEIGHT),
    "class weights in a lambda": lambda: lambda o, t: F.cross_entropy(o, t, weight=CLASS_WEIGHT),
    "cross entropy in a lambda": lambda: lambda o, t: F.cross_entropy(o, t),
    "masked mean": lambda: _masked_mean,
    "(total, count)": lambda: _rows,
    "mean_loss": lambda: mk.mean_loss(F.cross_entropy),
    "mean_loss, weights": lambda: mk.mean_loss(nn.CrossEntropyLoss(CLASS_WEIGHT)),
    "sum": lambda: lambda o, t: F.mse_loss(o, one_hot(t), reduction="sum"),
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
        """Clip, then step."""
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        return super().step(closure)


class TrustRatio(torch.optim.SGD):
    """Scales each parameter's step by its norm, as LARS does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Scale each gradient, then step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(p.norm() / (p.grad.norm() + 1e-3))
        return super().step(closure)


class Coupled(torch.optim.SGD):
    """A step's size depends on how many parameters there are."""

    def step(self, closure: Any = None) -> Any:
        """Divide by the number of tensors, then step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(len(group["params"]))
        return super().step(closure)


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-6)


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


def _last_only(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(params)[-1:], lr=0.1)


def _by_number(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.SGD(params, lr=0.5 / len(params))


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
    "adamw": _adamw,
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, eps=1e-6),
    "by dimensions": _by_dimensions,
    "first apart": _first_apart,
    "last only": _last_only,
    "by number": _by_number,
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
