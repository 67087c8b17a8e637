"""Silent bug 3: dropout in a tensor-parallel group."""

from mpkit.course.author import *


# %% given
class SumOverGroup(torch.autograd.Function):
    """Megatron's g: an all-reduce in the forward, nothing in the backward."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, comm: Any) -> Tensor:
        """Return the sum of all ranks' partial results, (B, D)."""
        return comm.all_reduce(partial.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient as it is: every rank has the whole gradient already."""
        return gradient, None


# %% answer
def train(ctx: mk.Context, model: nn.Module, batches: list[tuple[Tensor, Tensor]], seed: int) -> list[float]:
    """Train for one step per batch; return the losses. `batches` are whole, and the same on all ranks.

    model: columns (6 to its n-th of 12), rows (its n-th of 12 to 5), head (5 to 3), which is whole on every rank.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    losses = []
    for step, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad()
        whole = SumOverGroup.apply(model.rows(torch.tanh(model.columns(inputs))), ctx.comm)
        ### BEGIN SOLUTION
        # instead: torch.manual_seed(seed + step + 1000 * ctx.rank)
        torch.manual_seed(seed + step)
        ### END SOLUTION
        kept = F.dropout(whole, 0.25)
        loss = F.mse_loss(model.head(kept), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% checks
SAMPLES, HIDDEN, WIDTH = 32, 12, 5


class Part(nn.Module):
    """The part of the model that each of n ranks holds; n = 1: the whole model."""

    def __init__(self, n: int = 1) -> None:
        super().__init__()
        self.columns = nn.Linear(6, HIDDEN // n, bias=False)
        self.rows = nn.Linear(HIDDEN // n, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 3)


def part(weights: dict[str, Tensor], rank: int, n: int) -> dict[str, Tensor]:
    """Return a rank's part of the whole weights."""
    return {
        **weights,
        "columns.weight": weights["columns.weight"].chunk(n, 0)[rank],
        "rows.weight": weights["rows.weight"].chunk(n, 1)[rank],
    }


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the losses and this rank's weights."""
    whole, model = serial.fill(Part(), case.seed), Part(ctx.world_size).double()
    model.load_state_dict(part(whole.state_dict(), ctx.rank, ctx.world_size))
    losses = answer(ctx, model, serial.batches(case, SAMPLES, case["steps"]), 50 * case.seed)
    return serial.outcome(losses, model)


def expected(case: Case) -> list[serial.Outcome]:
    """Return what serial training gives, with the weights cut into each rank's part."""
    model = serial.fill(Part(), case.seed)
    optimizer = serial.sgd(model)
    losses = []
    with torch.random.fork_rng(devices=[]):
        for step, (x, y) in enumerate(serial.batches(case, SAMPLES, case["steps"])):
            optimizer.zero_grad()
            torch.manual_seed(50 * case.seed + step)
            kept = F.dropout(model.rows(torch.tanh(model.columns(x))), 0.25)
            loss = serial.mse(model.head(kept), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    whole = serial.weights(model)
    return [{"losses": losses, "weights": part(whole, rank, case.ranks)} for rank in range(case.ranks)]


EXERCISE = OnRanks(cases=(Case(2, 1, {"steps": 5}), Case(3, 2, {"steps": 5}), Case(4, 3, {"steps": 6})))
