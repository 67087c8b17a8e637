"""Silent bug 2: the loader."""

from mpkit.course.author import *


# %% answer
def train(
    ctx: mk.Context, model: nn.Module, data: tuple[Tensor, Tensor], batch: int, steps: int, seed: int
) -> list[float]:
    """Train for some steps of one epoch; return the losses.

    data: inputs (N, 6) and targets (N, 3), whole on every rank; batch: B, a multiple of ctx.world_size.
    """
    inputs, targets = data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    losses = []
    for step in range(steps):
        ### BEGIN SOLUTION
        # instead: share = batch // ctx.world_size
        # instead: mine = order[step * share : (step + 1) * share]
        share = batch // ctx.world_size
        begin = step * batch + ctx.rank * share
        mine = order[begin : begin + share]
        ### END SOLUTION
        loss = F.mse_loss(model(inputs[mine]), targets[mine])
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            ctx.comm.all_reduce(parameter.grad, op="mean")
        optimizer.step()
        losses.append(ctx.comm.all_reduce(loss.detach(), op="mean").item())
    return losses


# %% checks
BATCHES = 6


def size(case: Case) -> int:
    """Return B, the samples of a whole batch."""
    return 12 * case.ranks


def data(case: Case) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of one epoch."""
    return serial.batches(case, BATCHES * size(case), 1)[0]


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the losses and the weights of the answer."""
    model, seen = serial.model(case.seed), [0]

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[0] += len(inputs[0])

    model.register_forward_pre_hook(count)
    losses = answer(ctx, model, data(case), size(case), case["steps"], 7 * case.seed)
    return {**serial.outcome(losses, model), "samples": seen[0]}


def expected(case: Case) -> list[serial.Outcome]:
    """Return what serial training gives."""
    x, y = data(case)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(7 * case.seed))
    batches = [(x[some], y[some]) for some in order.split(size(case))]
    trained = serial.train(serial.model(case.seed), batches[: case["steps"]])
    return [{**trained, "samples": case["steps"] * size(case) // case.ranks}] * case.ranks


EXERCISE = OnRanks(cases=(Case(2, 1, {"steps": 4}), Case(3, 2, {"steps": 3}), Case(4, 3, {"steps": 5})))
