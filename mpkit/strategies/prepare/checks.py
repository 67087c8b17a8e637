"""The checks: what is rejected before a rank starts, since it would not be equal to serial training.

`prepare` runs them in this order and stops at the first rejection. Each reads the `ResolvedPlan` and the `Task`, and
none hands them on to another, so that any of them can be read by itself. Those that try something for real come last.

What is rejected before: arguments of wrong types and values (`arguments`), and whatever the plan cannot be resolved
for, such as a model that refuses its data, or more stages than layers (`resolve`).

docs/checks.md prints this table, with the message that each example gets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mpkit.strategies.job.resolved_plan import ResolvedPlan
from mpkit.strategies.prepare.arguments.task import Rejection, Task
from mpkit.strategies.prepare.balanced_routing import check_balanced_routing
from mpkit.strategies.prepare.forward_effects import check_forward_effects
from mpkit.strategies.prepare.hooks import check_gradient_hooks, check_state_hooks, check_wrapped_layers
from mpkit.strategies.prepare.layers import (
    check_batchnorms,
    check_compiled,
    check_computed_weights,
    check_embeddings,
)
from mpkit.strategies.prepare.optimizer.examine import check_optimizer
from mpkit.strategies.prepare.outputs import (
    check_gathered_outputs,
    check_unused_parameters,
    check_whole_batch_loss,
)
from mpkit.strategies.prepare.recompute import check_recomputed_blocks
from mpkit.strategies.prepare.resume import check_saved_state
from mpkit.strategies.prepare.shared_memory import check_shared_memory

__all__ = ["CHECKS", "SET_UP", "Check", "find_rejection"]


class Check(NamedTuple):
    """A row of the table.

    Attributes:
        name: what is looked at.
        find: returns the rejection; None if there is nothing to reject. Its docstring says what it rejects.
        example: what it rejects, as code that runs after `SET_UP`.
    """

    name: str
    find: Callable[[ResolvedPlan, Task], Rejection | None]
    example: str


SET_UP = """
import torch
from torch import nn
from torch.nn.functional import mse_loss

import mpkit as mk

torch.manual_seed(0)
x, y = torch.randn(8, 4), torch.randn(8, 4)


def train(model, plan, data=(x, y), loss=mse_loss, optimizer=torch.optim.SGD, **options):
    mk.Cluster(ranks=plan.ranks).train(model, [data], plan, loss=loss, optimizer=optimizer, **options)
"""

CHECKS = (
    Check("shared memory", check_shared_memory, """
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
model[1].weight = nn.Parameter(model[0].weight.data)
train(model, mk.Plan.ddp(2))
"""),
    Check("embeddings", check_embeddings, """
model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4))
train(model, mk.Plan.ddp(2), data=(torch.arange(8), y))
"""),
    Check("computed weights", check_computed_weights, """
model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
train(model, mk.Plan.gpipe(2, 4))
"""),
    Check("compiled modules", check_compiled, """
train(torch.compile(nn.Linear(4, 4)), mk.Plan.zero(3, 2))
"""),
    Check("BatchNorm", check_batchnorms, """
train(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), mk.Plan.gpipe(2, 4))
"""),
    Check("recomputed blocks", check_recomputed_blocks, """
train(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mk.Plan(recompute="every=3"))
"""),
    Check("hooks on gradients", check_gradient_hooks, """
model = nn.Linear(4, 4)
model.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
train(model, mk.Plan.ddp(2))
"""),
    Check("hooks and wrappers of layers", check_wrapped_layers, """
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
model[1].register_forward_hook(lambda layer, inputs, output: output / output.norm())
train(model, mk.Plan.tp(2))
"""),
    Check("hooks on the state dict", check_state_hooks, """
model = nn.Linear(4, 4)
model.register_state_dict_post_hook(lambda module, state, *_: state.update(step=torch.ones(1)))
train(model, mk.Plan.ddp(2))
"""),
    Check("effects of a forward", check_forward_effects, """
class Clamped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


train(nn.Sequential(nn.Linear(4, 4), Clamped(4, 4)), mk.Plan.gpipe(2, 4))
"""),
    Check("gathered outputs", check_gathered_outputs, """
class Named(nn.Linear):
    def forward(self, x):
        return {"logits": super().forward(x)}


train(Named(4, 4), mk.Plan.dp(2), loss=lambda outputs, targets: mse_loss(outputs["logits"], targets))
"""),
    Check("unused parameters", check_unused_parameters, """
model = nn.Linear(4, 4)
model.head = nn.Linear(4, 4)
train(model, mk.Plan.ddp(2))
"""),
    Check("optimizer", check_optimizer, """
train(nn.Linear(4, 4), mk.Plan.zero(2, 2), optimizer=torch.optim.Adafactor)
"""),
    Check("optimizer in checkpoints", check_saved_state, """
class Counts(torch.optim.SGD):
    count = 0

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)


train(nn.Linear(4, 4), mk.Plan.ddp(2), optimizer=Counts, checkpoint_every=10, checkpoint_dir="checkpoints")
"""),
    Check("loss of the whole batch", check_whole_batch_loss, """
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
train(model, mk.Plan.gpipe(2, 4), loss=mk.whole_batch_loss(mse_loss))
"""),
    Check("balanced routing", check_balanced_routing, """
model = mk.models.MixtureOfExperts(4, experts=4, aux_loss=0.01)
train(model, mk.Plan(dp=2, microbatches=2))
"""),
)  # fmt: skip


def find_rejection(resolved: ResolvedPlan, task: Task) -> Rejection | None:
    """Return the first check's rejection; None if all pass."""
    try:
        for check in CHECKS:
            rejection = check.find(resolved, task)
            if rejection is not None:
                return rejection
    except Rejection as raised:  # by what a check calls
        return raised
    return None
