"""Silent bug 4: two stages, one embedding."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Answer, Case
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def train(ctx: mk.Context, stage: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Train for one step per batch; return the losses. `batches`: tokens and targets, (B,) each.

    stage: rank 0's gives hidden values (B, D) for tokens, rank 1's scores (B, V) for hidden values. Both have
    `stage.embedding.weight`, E: (V, D), and begin with the same values of it.
    """
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)
    losses = []
    for tokens, targets in batches:
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        shape = len(tokens), stage.embedding.embedding_dim
        if ctx.rank == 0:
            hidden = stage(tokens)
            ctx.comm.send(hidden, 1)
            gradient = ctx.comm.recv(torch.empty(shape, dtype=hidden.dtype), 1)
            hidden.backward(gradient)
        else:
            hidden = ctx.comm.recv(torch.empty(shape, dtype=torch.float64), 0).requires_grad_()
            loss = F.cross_entropy(stage(hidden), targets)
            loss.backward()
            ctx.comm.send(hidden.grad, 0)
        ### BEGIN SOLUTION
        # instead: # here both ranks have all their gradients
        ctx.comm.all_reduce(stage.embedding.weight.grad)
        ### END SOLUTION
        optimizer.step()
        losses.append(ctx.comm.broadcast(loss.detach(), src=1).item())
    return losses


# %% checks
TOKENS, WIDTH = 7, 5


class First(nn.Module):
    """The first stage, which maps tokens to hidden values."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.linear = embedding, nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden values (B, D) of tokens (B,)."""
        return torch.tanh(self.linear(self.embedding(tokens)))


class Last(nn.Module):
    """The last stage, which maps hidden values to scores with the embedding's transpose."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.linear = embedding, nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the scores (B, V) of hidden values (B, D)."""
        return torch.tanh(self.linear(hidden)) @ self.embedding.weight.T


def stages(case: Case) -> nn.Sequential:
    """Return both stages, which share one embedding."""
    embedding = nn.Embedding(TOKENS, WIDTH)
    return serial.fill(nn.Sequential(First(embedding), Last(embedding)), case.seed)


def batches(case: Case) -> list[serial.Batch]:
    """Return batches in which the next token follows from the previous one most of the time."""
    generator, samples = case.generator(), 8 * case["steps"]
    follows = torch.randperm(TOKENS, generator=generator)
    made = []
    for _ in range(case["steps"]):
        tokens = torch.randint(TOKENS, (samples,), generator=generator)
        noise = torch.randint(TOKENS, (samples,), generator=generator)
        rarely = torch.rand(samples, generator=generator) < 0.1
        made.append((tokens, torch.where(rarely, noise, follows[tokens])))
    return made


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the losses and this stage's weights."""
    stage = copy.deepcopy(stages(case)[ctx.rank])
    return serial.outcome(answer(ctx, stage, batches(case)), stage)


def sgd(module: nn.Module) -> torch.optim.SGD:
    """Return the same optimizer as the program's."""
    return torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)


def expected(case: Case) -> list[serial.Outcome]:
    """Return what serial training gives: each rank has its stage's weights, and both have the embedding."""
    trained = serial.train(stages(case), batches(case), F.cross_entropy, sgd)
    outcomes = []
    for rank in range(2):
        own = {name[2:]: w for name, w in trained["weights"].items() if name.startswith(f"{rank}.")}
        own["embedding.weight"] = trained["weights"]["0.embedding.weight"]
        outcomes.append({**trained, "weights": own})
    return outcomes


EXERCISE = OnRanks(
    solution=train,
    cases=(Case(2, 1, {"steps": 4}), Case(2, 2, {"steps": 6}), Case(2, 3, {"steps": 5})),
    play=play,
    expected=expected,
    result="losses and weights",
    after="05-real-models",
    place=40,
)
