"""Mixed precision by hand: fp32 master weights."""

from mpkit.course.author import *


# %% answer
def train(
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> list[float]:
    """Train `model`, whose weights are bf16, in place, a step per batch of fp32 (inputs, targets); return losses."""
    ### BEGIN SOLUTION
    weights = list(model.parameters())
    masters = [weight.detach().float() for weight in weights]
    optimizer = make_optimizer(masters)
    losses = []
    for inputs, targets in batches:
        outputs = model(inputs.bfloat16())
        loss = loss_fn(outputs.float(), targets)
        model.zero_grad()
        loss.backward()
        for weight, master in zip(weights, masters, strict=True):
            master.grad = weight.grad.float()
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
        losses.append(loss.item())
    return losses
    ### END SOLUTION


# %% checks
STEPS, SAMPLES = 12, 8


def model(case: Case) -> nn.Module:
    """Return a model whose weights are bf16."""
    return serial.model(case.seed).bfloat16()


def batches(case: Case) -> list[serial.Batch]:
    """Return batches in fp32."""
    return [(x.float(), y.float()) for x, y in serial.batches(case, SAMPLES, STEPS)]


def optimizer_of(tensors: Any) -> torch.optim.Optimizer:
    """Return an Adam whose steps are smaller than what bf16 can tell apart."""
    return torch.optim.Adam(list(tensors), lr=5e-4, eps=1e-3)


def relative_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss that is another one if outputs and targets are swapped."""
    return ((outputs - targets) ** 2 / (1 + targets**2)).mean()


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return losses, weights, and the dtypes that layers, loss and optimizer have seen."""
    trained, dtypes = model(case), {"layers": set(), "loss": set(), "optimizer": set()}

    def watch(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        dtypes["layers"].add(str(output.dtype))

    def make_optimizer(tensors: Any) -> torch.optim.Optimizer:
        made = optimizer_of(tensors)
        dtypes["optimizer"] |= {str(each.dtype) for each in made.param_groups[0]["params"]}
        return made

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        dtypes["loss"] |= {str(outputs.dtype), str(targets.dtype)}
        return relative_error(outputs, targets)

    for layer in trained.children():
        layer.register_forward_hook(watch)
    losses = answer(trained, batches(case), make_optimizer, loss_fn)
    result = {"losses": losses, "weights": serial.weights(trained)}
    kinds = {name: sorted(each) for name, each in dtypes.items()}
    return {"dtypes": {**kinds, "weights": sorted({str(p.dtype) for p in trained.parameters()})}, **result}


def expected(case: Case) -> list[dict[str, object]]:
    """Return the same, with every phase written out: the model in fp32 computes with weights that are rounded."""
    trained = model(case)
    masters = [weight.detach().float().requires_grad_() for weight in trained.parameters()]
    optimizer, losses = optimizer_of(masters), []
    for x, y in batches(case):
        rounded = [master.detach().bfloat16().requires_grad_() for master in masters]
        names = [name for name, _ in trained.named_parameters()]
        out = torch.func.functional_call(trained, dict(zip(names, rounded, strict=True)), (x.bfloat16(),))
        loss = relative_error(out.float(), y)
        for master, grad in zip(masters, torch.autograd.grad(loss, rounded), strict=True):
            master.grad = grad.float()
        optimizer.step()
        losses.append(loss.item())
    final = {
        name: master.detach().bfloat16()
        for (name, _), master in zip(trained.named_parameters(), masters, strict=True)
    }
    fp32, bf16 = ["torch.float32"], ["torch.bfloat16"]
    dtypes = {"layers": bf16, "loss": fp32, "optimizer": fp32, "weights": bf16}
    return [{"dtypes": dtypes, "losses": losses, "weights": final}]


EXERCISE = OnRanks(cases=(Case(1, seed=1), Case(1, seed=2), Case(1, seed=5)))
