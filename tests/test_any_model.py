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


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=4, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=32, max_position_embeddings=16, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=4, hidden_size=16, intermediate_size=32, num_attention_heads=2, vocab_size=32,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config).double()


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=2, num_decoder_layers=3, d_model=16, d_kv=8, d_ff=32, num_heads=2, vocab_size=32,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).double()


def masked(words_in: int) -> dict[str, Tensor]:
    return {"input_ids": words(5, words_in), "attention_mask": padding([words_in, 3, 4, 1, 2], words_in)}


LANGUAGE: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    # batches of 5 in 3 micro-batches: 2, 2, 1; another length in the second step
    "gpt2": lambda: (gpt2(), [(masked(8), words(5, 8)), (masked(6), words(5, 6))]),
    "llama": lambda: (llama(), [(masked(8), words(5, 8)), (masked(6), words(5, 6))]),
    "bert": lambda: (bert(), [(masked(8), words(5, 8)), (masked(6), words(5, 6))]),
    "t5": lambda: (
        t5(),
        [(masked(n) | {"decoder_input_ids": words(5, 4)}, words(5, 4)) for n in (8, 6)],
    ),
}
PLANS = {
    "gpipe": mk.Plan.gpipe(3, 3),
    "1f1b": mk.Plan(pp=2, schedule="1f1b", microbatches=3, recompute="full"),
    "zb_h1": mk.Plan(pp=4, schedule="zb_h1", microbatches=3),
    "interleaved": mk.Plan(pp=2, schedule="interleaved_1f1b", microbatches=4, virtual_stages=2),
    "zbv": mk.Plan(pp=2, schedule="zbv", microbatches=4, virtual_stages=2),
}
PAIRS = [
    *[("gpt2", plan) for plan in PLANS],
    *[("t5", plan) for plan in ("gpipe", "1f1b", "interleaved")],
    *[("llama", plan) for plan in ("gpipe", "zbv")],
    *[("bert", plan) for plan in ("1f1b", "zb_h1")],
]


@pytest.mark.parametrize("kind, plan", PAIRS)
def test_transformers_equal_serial_training(train: Train, kind: str, plan: str) -> None:
    torch.manual_seed(1)
    model, data = LANGUAGE[kind]()
    how: dict[str, Any] = {"loss": next_word, "optimizer": adamw, "steps": 5, "max_grad_norm": 0.5}
    check_equal(train, model, data, PLANS[plan], **how)
