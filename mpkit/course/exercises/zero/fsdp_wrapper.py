"""FSDP as a wrapper."""

from mpkit.course.author import *
from mpkit.course.exercises.zero import flat


# %% answer
class Sharded(nn.Module):
    """Gathers the parameters of each block of `model` when it computes, and keeps an n-th of them otherwise."""

    def __init__(self, ctx: mk.Context, model: nn.Module) -> None:
        super().__init__()
        ### BEGIN SOLUTION
        # instead: self.shards = []
        # instead: raise NotImplementedError("your turn: the shards, and the hooks")
        self.ctx, self.model = ctx, model
        self.shards = []
        self.shard_of, self.shape_of = {}, {}
        n = ctx.world_size
        for block in model.children():
            for parameter in block.parameters():
                shard = flat([parameter], n).chunk(n)[ctx.rank].clone()
                self.shards.append(shard)
                self.shard_of[parameter], self.shape_of[parameter] = shard, parameter.shape
                parameter.register_post_accumulate_grad_hook(self.reduce)
            self.free(block)
            block.register_forward_pre_hook(lambda block, inputs: self.gather(block))
            block.register_forward_hook(lambda block, inputs, outputs: self.free(block))
            block.register_full_backward_pre_hook(lambda block, grad: self.gather(block))

    def gather(self, block: nn.Module) -> None:
        """Fill a block's parameters from all ranks' shards."""
        for parameter in block.parameters():
            whole = self.ctx.comm.all_gather(self.shard_of[parameter])
            shape = self.shape_of[parameter]
            parameter.data = whole[: shape.numel()].view(shape)

    def free(self, block: nn.Module) -> None:
        """Free a block's parameters."""
        for parameter in block.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype)

    def reduce(self, parameter: nn.Parameter) -> None:
        """Give the shard its n-th of the mean gradient; free the gradient and the parameter."""
        n = self.ctx.world_size
        assert parameter.grad is not None
        self.shard_of[parameter].grad = self.ctx.comm.reduce_scatter(flat([parameter.grad], n)) / n
        parameter.grad = None
        parameter.data = torch.empty(0, dtype=parameter.dtype)
        ### END SOLUTION

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's outputs."""
        ### BEGIN SOLUTION
        return self.model(x)
        ### END SOLUTION


# %% checks
BLOCKS, WIDTH, SAMPLES, STEPS = 8, 10, 12, 2
HELD, SENT = "bytes held at a time", "bytes that a rank sends, on a ring"


class Block(nn.Module):
    """A block: tanh(x W + b)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, [samples, WIDTH]."""
        return torch.tanh(x @ self.weight + self.bias)


def model(case: Case) -> nn.Sequential:
    """Return the blocks, the same on every rank."""
    return serial.fill(nn.Sequential(*(Block() for _ in range(BLOCKS))), case.seed)


def batches(case: Case) -> list[serial.Batch]:
    """Return the whole batch of each step."""
    x = torch.randn(STEPS, 2, SAMPLES, WIDTH, generator=case.generator(), dtype=torch.float64)
    return [(inputs, torch.tanh(targets)) for inputs, targets in x]


def left(module: nn.Module) -> list[int]:
    """Return how many parameters are gathered, and how many have a gradient."""
    gathered = sum(parameter.untyped_storage().nbytes() > 0 for parameter in module.parameters())
    return [gathered, sum(parameter.grad is not None for parameter in module.parameters())]


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Train; return the losses, this rank's shards, and what is gathered after forwards and backwards."""
    blocks, result = model(case), {"after the forward": [], "after the backward": [], "losses": []}
    with Memory(ctx):
        sharded = answer(ctx, blocks)
        optimizer = serial.adam(sharded.shards)
        for batch in batches(case):
            x, y = serial.share(batch, ctx.rank, ctx.world_size)
            optimizer.zero_grad()
            loss = serial.mse(sharded(x), y)
            result["after the forward"].append(left(blocks)[0])
            loss.backward()
            result["after the backward"].append(left(blocks))
            optimizer.step()
            result["losses"].append(loss.item())
    return {**result, "shards": list(sharded.shards)}


def expected(case: Case) -> list[dict[str, object]]:
    """Return the same, by serial training."""
    whole, n = model(case), case.ranks
    optimizer = serial.adam(whole)
    losses: list[list[float]] = [[] for _ in range(n)]
    for batch in batches(case):
        optimizer.zero_grad()
        for rank in range(n):
            x, y = serial.share(batch, rank, n)
            loss = serial.mse(whole(x), y)
            losses[rank].append(loss.item())
            (loss / n).backward()
        optimizer.step()
    none = {"after the forward": [0] * STEPS, "after the backward": [[0, 0]] * STEPS}
    return [
        {
            **none,
            "losses": losses[rank],
            "shards": [flat([parameter], n).chunk(n)[rank] for parameter in whole.parameters()],
        }
        for rank in range(n)
    ]


def shard_numbers(case: Case) -> int:
    """Return how many numbers a rank's shards have, with what they are filled up with."""
    return sum(-(-parameter.numel() // case.ranks) for parameter in model(case).parameters())


def held(case: Case) -> float:
    """Return the bytes that may be held: shards, their gradients and Adam's states; three blocks; activations."""
    block = (WIDTH * WIDTH + WIDTH + 2 * case.ranks) * 8
    activations = (3 * BLOCKS + 6) * SAMPLES / case.ranks * WIDTH * 8
    return 4 * shard_numbers(case) * 8 + 3 * block + activations


EXERCISE = OnRanks(
    cases=(Case(2, seed=91), Case(3, seed=92)),
    budgets=(
        Budget(HELD, peak(), held, "bytes"),
        Budget(SENT, ring, lambda case: STEPS * 3 * (case.ranks - 1) * shard_numbers(case) * 8 + 1, "bytes"),
        Budget("collectives", collectives, STEPS * 3 * 2 * BLOCKS),
    ),
)
