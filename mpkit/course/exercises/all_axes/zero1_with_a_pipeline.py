"""ZeRO-1 with a pipeline."""

from mpkit.course.author import *
from mpkit.course.framework.serial import adam
from mpkit.course.framework.serial import model as network
from mpkit.plan.mesh import Mesh


# %% given
def flatten(tensors: list[Tensor | None], n: int) -> Tensor:
    """Return all elements in one row, with zeros at the end up to a multiple of n: (k n,)."""
    row = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return F.pad(row, (0, -len(row) % n))


def unflatten(row: Tensor, tensors: list[Tensor]) -> None:
    """Copy from such a row into the tensors."""
    first = 0
    for tensor in tensors:
        tensor.data.copy_(row[first : first + tensor.numel()].view_as(tensor))
        first += tensor.numel()


# %% answer
class Zero1:
    """A rank's part of its stage's optimizer.

    ctx: this rank's. stage: its part of the model. dp: replicas of each stage; there are world_size // dp stages.
    adam: adam([tensor]) makes an optimizer that steps a tensor by its `.grad`.
    """

    def __init__(self, ctx: mk.Context, stage: nn.Module, dp: int, adam: type[torch.optim.Adam]) -> None:
        self.ctx, self.dp = ctx, dp
        self.parameters = list(stage.parameters())
        ### BEGIN SOLUTION
        # instead: raise NotImplementedError("your turn: this stage's dp group, this rank's shard, its optimizer")
        groups = [ctx.comm.group(range(first, first + dp)) for first in range(0, ctx.world_size, dp)]
        self.group = groups[ctx.rank // dp]
        self.shard = flatten(self.parameters, dp).chunk(dp)[ctx.rank % dp].clone()
        self.optimizer = adam([self.shard])
        ### END SOLUTION

    def step(self) -> None:
        """Step once, after the backwards: each parameter has this replica's gradient in `.grad`."""
        ### BEGIN SOLUTION
        gradients = flatten([parameter.grad for parameter in self.parameters], self.dp)
        self.shard.grad = self.group.reduce_scatter(gradients) / self.dp
        self.optimizer.step()
        unflatten(self.group.all_gather(self.shard), self.parameters)
        ### END SOLUTION


# %% checks
STEPS, SAMPLES = 2, 4


def stages(case: Case) -> list[nn.Sequential]:
    """Return one stage per rank along pp, of different sizes."""
    count = case.ranks // case["dp"]
    whole = list(network(case.seed, (6, *range(9, 9 - count, -1), 6)))
    return [nn.Sequential(*whole[2 * stage : 2 * stage + 2]) for stage in range(count - 1)] + [
        nn.Sequential(*whole[2 * count - 2 :])
    ]


def batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Return one whole batch per step."""
    shape = (STEPS, 2, SAMPLES * case["dp"], 6)
    drawn = torch.randn(shape, generator=case.generator(), dtype=torch.float64)
    return [(x, y) for x, y in drawn]


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run two steps of naive MP with replicas; return the stage's parameters after them."""
    place = Mesh(pp=case.ranks // case["dp"], dp=case["dp"]).place(ctx.rank)
    stage, n = stages(case)[place.pp], case["dp"]
    record_stage(ctx, stage, place.pp)
    widths = [part[0].in_features for part in stages(case)]
    with Memory(ctx, stage.parameters()):
        zero = answer(ctx, stage, n, adam)
        for x, y in batches(case):
            x, y = x[place.dp :: n].clone(), y[place.dp :: n]
            if place.pp:
                x = ctx.comm.recv(x.new_empty(len(x), widths[place.pp]), ctx.rank - n).requires_grad_()
            output = stage(x)
            if ctx.rank + n < case.ranks:
                ctx.comm.send(output, ctx.rank + n)
                output.backward(ctx.comm.recv(torch.empty_like(output), ctx.rank + n))
            else:
                F.mse_loss(output, y).backward()
            if place.pp:
                ctx.comm.send(x.grad, ctx.rank - n)
            zero.step()
            stage.zero_grad()
    return {name: parameter.detach() for name, parameter in stage.named_parameters()}


def expected(case: Case) -> list[object]:
    """Train serially; return each rank's stage's parameters."""
    parts = stages(case)
    whole = nn.Sequential(*parts)
    optimizer = adam(list(whole.parameters()))
    for x, y in batches(case):
        optimizer.zero_grad()
        F.mse_loss(whole(x), y).backward()
        optimizer.step()
    weights = [{name: p.detach() for name, p in part.named_parameters()} for part in parts]
    return [weights[rank // case["dp"]] for rank in range(case.ranks)]


def largest(case: Case) -> int:
    """Return the number of elements of the largest stage, padded to a multiple of dp."""
    n = case["dp"]
    return max(-(-sum(p.numel() for p in part.parameters()) // n) * n for part in stages(case))


EXERCISE = OnRanks(
    cases=(Case(2, 1, {"dp": 2}), Case(4, 2, {"dp": 2}), Case(6, 3, {"dp": 2}), Case(6, 4, {"dp": 3})),
    budgets=(
        Budget(
            "bytes of optimizer states on a rank",
            peak("optimizer"),
            lambda case: float(2 * 8 * largest(case) // case["dp"]),
            "bytes",
        ),
        Budget("collectives that a rank takes part in", collectives, 2 * STEPS),
        Budget(
            "bytes that a rank sends for them",
            ring,
            lambda case: 2 * STEPS * 8 * largest(case) * (1 - 1 / case["dp"]),
            "bytes",
        ),
    ),
)
