"""Whole models over sequences that are shared out: each rank computes on its part, and all is as if it were whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.plan.mesh import Mesh
from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.context.divided_attention import ContextParallel
from mpkit.strategies.context.sequence import sequence_part, shift_positions
from mpkit.strategies.data.microbatch import Value
from mpkit.strategies.models.gpt import GPT, next_token_loss
from mpkit.strategies.prepare.resolve.sequences import check_context_parallel
from mpkit.strategies.stage.selective_recompute import AttentionAgain
from mpkit.strategies.stage.split_backward import input_grads
from mpkit.strategies.stage.stage import call
from mpkit.strategies.tensor import tensor_parallel
from mpkit.trace import Kind

EXACT = {"rtol": 1e-9, "atol": 1e-11}
NEAR = {"rtol": 1e-4, "atol": 1e-7}  # Llama's norms compute in fp32, whatever the model's dtype
Clusters = Callable[[int], mk.Cluster]


class Logits(nn.Module):
    """A model inside of another, which knows nothing of positions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits


def llama(**how: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=19, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, **how,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=19, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=19, n_positions=32, n_embd=16, n_layer=2, n_head=2, **none))


def roberta() -> nn.Module:
    from transformers import RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(
        vocab_size=19, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=34, hidden_dropout_prob=0, attention_probs_dropout_prob=0, pad_token_id=1,
    )  # fmt: skip
    return RobertaForMaskedLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(vocab=19, length=24, layers=2, width=12, heads=3),
    "gpt2": gpt2,
    "llama": llama,
    "llama in a module": lambda: Logits(llama(use_cache=False)),
    "bert": bert,
    "roberta": roberta,
}


def logits(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out.logits


def losses(model: nn.Module, inputs: Value, targets: Tensor, modes: list[Any], full: bool) -> list[Any]:
    """The loss, and the gradients of the weights; with `full`, of a forward that is computed again."""
    found = []
    for grad in [torch.no_grad()] * full + [nullcontext()]:
        with grad, modes[0], modes[1]:
            found.append(next_token_loss(logits(call(model, inputs, first=True)), targets))
    found[-1].backward()
    return [found[0].detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}]


Case = tuple[nn.Module, Value, Tensor, str, str]


def on_a_rank(ctx: Any, cases: list[Case]) -> list[Any]:
    axis, found = ctx.comm, []
    for model, inputs, targets, order, recompute in cases:
        shift_positions(model, axis, order)
        mine, wanted = (sequence_part(value, axis.index, axis.size, order) for value in (inputs, targets))
        again = AttentionAgain() if recompute == "selective" else nullcontext()
        modes = [again, ContextParallel(axis, order)]
        found.append(losses(model, mine, wanted, modes, recompute == "full"))
    return found


def tokens(batch: int, s: int) -> tuple[Tensor, Tensor]:
    return torch.randint(2, 19, (batch, s)), torch.randint(2, 19, (batch, s))


def check(clusters: Clusters, n: int, cases: list[Case]) -> None:
    for model, inputs, targets, order, _ in cases:
        check_context_parallel(model, inputs, targets, n, order)
    ranks = clusters(n).run(on_a_rank, cases)
    for (model, inputs, targets, _, _), *of_ranks in zip(cases, *ranks, strict=True):
        near = NEAR if "Llama" in repr(model) else EXACT
        whole, gradients = losses(copy.deepcopy(model), inputs, targets, [nullcontext()] * 2, False)
        torch.testing.assert_close(sum(loss for loss, _ in of_ranks) / n, whole, **near)
        assert all(found.keys() == gradients.keys() for _, found in of_ranks)
        summed = {name: sum(found[name] for _, found in of_ranks) / n for name in gradients}
        torch.testing.assert_close(summed, gradients, **near)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("n", "named"),
    [
        (4, [("gpt", "zigzag", "none"), ("gpt", "contiguous", "full"), ("gpt", "zigzag", "selective")]),
        (3, [("gpt", "contiguous", "selective"), ("bert", "contiguous", "none"), ("llama", "contiguous", "none")]),
        (2, [("llama", "zigzag", "none"), ("bert", "zigzag", "selective"), ("gpt2", "zigzag", "none"),
             ("llama in a module", "contiguous", "full"), ("roberta", "contiguous", "none")]),
    ],
    ids=["4", "3", "2"],
)  # fmt: skip
def test_gradients_are_those_of_the_whole_sequence(clusters: Clusters, n: int, named: Any) -> None:
    torch.manual_seed(n)
    cases = []
    for name, order, recompute in named:
        inputs, targets = tokens(2, 24)
        given: dict[str, Value] = {
            # RoBERTa counts positions from 2; who knows that gives them
            "roberta": {"input_ids": inputs, "position_ids": torch.arange(2, 26).expand(2, 24)},
            "llama": {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)},
        }
        cases.append((MODELS[name]().double(), given.get(name, inputs), targets, order, recompute))
    check(clusters, n, cases)


def in_halves(ctx: Any, block: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    axis = ctx.comm
    x, dy = (sequence_part(tensor, axis.index, axis.size) for tensor in (x, dy))
    x.requires_grad_()
    with ContextParallel(axis):
        y = block(x)
    (dx,), weight_grads = input_grads([y], (dy,), [x])
    weight_grads.run()
    return dx, {name: p.grad for name, p in block.named_parameters()}


def test_a_backward_in_halves_goes_round_in_its_first(clusters: Clusters) -> None:
    torch.manual_seed(5)
    n, cluster, block = 3, clusters(3), MODELS["gpt"]().double().block0
    x, dy = (torch.randn(2, 12, 12, dtype=torch.float64) for _ in range(2))
    ranks = cluster.run(in_halves, copy.deepcopy(block), x, dy)
    # K forward; K and G backward, once
    assert [(part.ops["kind"] == Kind.SEND).sum() for part in cluster.trace.ranks] == [3 * (n - 1)] * n
    x.requires_grad_()
    block(x).backward(dy)
    torch.testing.assert_close(torch.cat([dx for dx, _ in ranks], 1), x.grad, **EXACT)
    for name, parameter in block.named_parameters():
        torch.testing.assert_close(sum(found[name] for _, found in ranks), parameter.grad, **EXACT)


# ---------------------------------------------------------------- with layers that are shared, too


def on_a_mesh(ctx: Any, model: nn.Module, x: Tensor, y: Tensor) -> list[Any]:
    axes = MeshAxes(ctx.comm, ctx.device, Mesh(cp=2, tp=2))
    cp, tp = axes.communicator_of("cp"), axes.communicator_of("tp")
    x, y = (sequence_part(value, cp.index, cp.size) for value in (x, y))
    found = []
    for divided in (False, True):
        shards = tensor_parallel(ctx, copy.deepcopy(model), group=tp, sequence=divided)
        shift_positions(shards, cp)
        loss, gradients = losses(shards, x, y, [nullcontext(), ContextParallel(cp)], False)
        found.append((loss, {name: cp.all_reduce(each) / cp.size for name, each in gradients.items()}))
    return found


def test_with_tensor_parallelism(clusters: Clusters) -> None:
    torch.manual_seed(6)
    model, (x, y) = GPT(vocab=19, length=24, layers=2, width=12, heads=2).double(), tokens(2, 24)
    ranks = clusters(4).run(on_a_mesh, model, x, y)
    whole, gradients = losses(model, x, y, [nullcontext()] * 2, False)
    for k in range(2):  # without and with sequence parallelism
        torch.testing.assert_close(sum(found[k][0] for found in ranks) / 4, whole, **EXACT)
        for name, gradient in gradients.items():
            shards = [ranks[tp][k][1][name] for tp in range(2)]
            if shards[0].shape == gradient.shape:
                torch.testing.assert_close(shards[0], gradient, **EXACT)
            else:  # which part is whose is tested with tensor parallelism
                squares = sum(shard.square().sum() for shard in shards)
                torch.testing.assert_close(squares, gradient.square().sum(), **EXACT)
