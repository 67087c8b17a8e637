"""An example of a call of `Cluster.train`, and what other libraries call its arguments."""

from __future__ import annotations

__all__ = ["EXAMPLE", "MEANT"]

EXAMPLE = """\
cluster.train(
    model,
    data,  # [(inputs, targets), ...], or mk.Batches(dataset, batch_size=32)
    mk.Plan.ddp(2),
    loss=torch.nn.functional.cross_entropy,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    steps=10,
)"""

MEANT = {
    "batch_size": "The batches are the data's: data=mk.Batches(dataset, batch_size=32).",
    "callback": "It is on_step= here, a function on every rank: on_step=lambda ctx, step: ctx.log('loss', ctx.loss).",
    "callbacks": "It is on_step= here, a function on every rank: on_step=lambda ctx, step: ctx.log('loss', ctx.loss).",
    "criterion": "It is called loss here: loss(outputs, targets).",
    "device": "The device is the cluster's: mk.Cluster(ranks=2, device='cpu').",
    "epochs": "Trainings are counted in steps: steps=epochs * len(data).",
    "ema_decay": "It is called ema here: ema=0.999.",
    "eval_data": "It is evaluate= here: evaluate=batches, or evaluate=(batches, metric).",
    "eval_every": "It is every= here, beside evaluate=batches.",
    "gradient_accumulation_steps": "It is microbatches= of a Plan: mk.Plan.ddp(2, microbatches=4).",
    "grad_clip": "It is called max_grad_norm here.",
    "learning_rate": "It is the optimizer's: optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3).",
    "loss_fn": "It is called loss here: loss(outputs, targets).",
    "lr": "It is the optimizer's: optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3).",
    "lr_scheduler": "It is lr_schedule= here, a factor of the rate: lr_schedule=lambda step: 0.9**step.",
    "metrics": "It is evaluate=(batches, metric) here, and ctx.log(name, value) in on_step.",
    "num_steps": "It is called steps here.",
    "num_workers": "Workers are the data's: data=mk.Batches(dataset, batch_size=32, num_workers=4).",
    "optimizers": "It is optimizer=lambda params: [one, other] here: a list is several.",
    "ranks": "The ranks are the cluster's, mk.Cluster(ranks=2), and what they do the plan's, mk.Plan.ddp(2).",
    "scheduler": "It is lr_schedule= here, a factor of the rate: lr_schedule=lambda step: 0.9**step.",
    "validation_data": "It is evaluate= here: evaluate=batches, or evaluate=(batches, metric).",
}
"""What other libraries call arguments of `Cluster.train`."""
