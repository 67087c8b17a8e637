"""Models as people have them, cut over ranks without being rewritten: training equals serial training.

Transformers' models are built from small configs, nothing is downloaded. Serial training is plain PyTorch.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.run import Run

Train = Callable[..., Run]
# Ranks get this module's functions by value, and need not import the module and what tests need.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def train(clusters: Callable[[int], mk.Cluster]) -> Train:
    """`train(model, data, plan, ...)` on as many ranks as the plan takes, waited for."""

    def run(model: nn.Module, data: Any, plan: mk.Plan, **how: Any) -> Run:
        return clusters(plan.ranks).train(model, data, plan, **how).wait()

    return run


def called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def serial(
    model: nn.Module, data: Any, *, loss: Any, optimizer: Any, steps: int, max_grad_norm: float | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """The same training on one process, as anyone would write it."""
    model = copy.deepcopy(model)
    opt = optimizer(model.parameters())
    losses = []
    for step in range(steps):
        inputs, targets = data[step % len(data)]
        opt.zero_grad()
        value = loss(called(model, inputs), targets)
        value.backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        opt.step()
        losses.append(value.item())
    return losses, model.state_dict()


def check_equal(train: Train, model: nn.Module, data: Any, plan: mk.Plan, **how: Any) -> Run:
    """Losses and weights after training by `plan` are those of serial training."""
    exact = {"rtol": 1e-8, "atol": 1e-10}
    losses, weights = serial(model, data, **how)
    run = train(model, data, plan, **how)
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(losses), **exact)
    assert list(run.state_dict()) == list(weights)
    for name, value in run.state_dict().items():
        torch.testing.assert_close(value, weights[name], **exact, msg=lambda m, n=name: f"{n}: {m}")
    return run


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


# ---------------------------------------------------------------- transformers


def next_word(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def words(*shape: int) -> Tensor:
    return torch.randint(32, shape)


def padding(lengths: list[int], longest: int) -> Tensor:
    return (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()


def gpt2(**changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_layer": 4, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**(small | no_dropout | ends | changes))).double()


def test_gpt2_with_an_attention_mask(train: Train) -> None:
    torch.manual_seed(0)
    inputs = {"input_ids": words(4, 8), "attention_mask": padding([8, 6, 8, 3], 8)}
    data = [(inputs, words(4, 8))]
    check_equal(train, gpt2(), data, mk.Plan.gpipe(2, 2), loss=next_word, optimizer=adamw, steps=5)
