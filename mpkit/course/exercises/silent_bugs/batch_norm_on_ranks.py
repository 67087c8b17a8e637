"""Silent bug 4: batch norm on ranks."""

from mpkit.course.author import *


# %% given
class SumOverRanks(torch.autograd.Function):
    """The sum over ranks, on every rank; gradients are summed over ranks as well."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Any) -> Tensor:
        """Sum the values."""
        ctx.comm = comm
        return comm.all_reduce(tensor.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sum the gradients."""
        return ctx.comm.all_reduce(gradient.clone()), None


# %% answer
def normalize(ctx: mk.Context, x: Tensor) -> Tensor:
    """Normalize each channel to mean 0 and variance 1 over the whole batch. x: (k, channels), this rank's k samples."""
    ### BEGIN SOLUTION
    # instead: mean = x.mean(0)
    # instead: var = (x - mean).square().mean(0)
    samples = len(x) * ctx.world_size
    mean = SumOverRanks.apply(x.sum(0), ctx.comm) / samples
    var = SumOverRanks.apply((x - mean).square().sum(0), ctx.comm) / samples
    ### END SOLUTION
    return (x - mean) / (var + 1e-5).sqrt()


def train(ctx: mk.Context, model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Train for one step per batch; return the losses. `batches` are whole ones, (B, 6) and (B, 3), on every rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    losses = []
    for inputs, targets in batches:
        mine = slice(ctx.rank, None, ctx.world_size)
        normal = normalize(ctx, model.first(inputs[mine]))
        outputs = model.last(torch.tanh(model.scale * normal + model.shift))
        loss = F.mse_loss(outputs, targets[mine])
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            ctx.comm.all_reduce(parameter.grad, op="mean")
        optimizer.step()
        losses.append(ctx.comm.all_reduce(loss.detach(), op="mean").item())
    return losses


# %% checks
SAMPLES, CHANNELS = 12, 5


class Normed(nn.Module):
    """A model of two layers with a BatchNorm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, CHANNELS), nn.Linear(CHANNELS, 3)
        self.scale, self.shift = nn.Parameter(torch.ones(CHANNELS)), nn.Parameter(torch.zeros(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output on one device, with torch's own batch norm."""
        normal = F.batch_norm(self.first(x), None, None, self.scale, self.shift, training=True, eps=1e-5)
        return self.last(torch.tanh(normal))


def batches(case: Case) -> list[serial.Batch]:
    """Return batches with few samples per rank, so that the ranks' means differ."""
    return serial.batches(case, SAMPLES, case["steps"])


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the losses and the weights of the answer."""
    model = serial.fill(Normed(), case.seed)
    return serial.outcome(answer(ctx, model, batches(case)), model)


def expected(case: Case) -> list[serial.Outcome]:
    """Return what serial training gives."""
    return [serial.train(serial.fill(Normed(), case.seed), batches(case))] * case.ranks


def bound(case: Case) -> float:
    """Return enough bytes for gradients, losses, and some numbers per channel."""
    numbers = sum(parameter.numel() for parameter in Normed().parameters()) + 1 + 12 * CHANNELS
    return 8 * float(case["steps"]) * numbers


EXERCISE = OnRanks(
    cases=(Case(2, 1, {"steps": 4}), Case(3, 2, {"steps": 4}), Case(4, 3, {"steps": 4})),
    budgets=(Budget("payload", payload, bound, "bytes"),),
)
