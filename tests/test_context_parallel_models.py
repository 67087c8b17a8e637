"""Whole models over sequences that are shared out: each rank computes on its part, and all is as if it were whole."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import cloudpickle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mpkit as mk
from mpkit.models.gpt import GPT, next_token_loss
from mpkit.parallel.axis import Axis, Pretended
from mpkit.parallel.context.checks import check_context_parallel
from mpkit.parallel.context.inside import ContextParallel
from mpkit.parallel.context.positions import positions_of, shift_positions
from mpkit.parallel.context.sequence import ORDERS, check_sequences, pieces, sequence_part
from mpkit.parallel.microbatch import Value
from mpkit.parallel.selective import AttentionAgain
from mpkit.parallel.split_backward import input_grads
from mpkit.parallel.stage import call
from mpkit.prepare.dry_run import quiet
from mpkit.trace import Kind

# Ranks get this module's functions by value, and need not import the module and what tests need.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

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


def gpt2(**how: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0} | how
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
    axis, found = Axis(ctx.comm), []
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
    axis = Axis(ctx.comm)
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


# ---------------------------------------------------------------- parts of sequences


@given(st.integers(1, 4), st.sampled_from(ORDERS), st.integers(1, 3))
def test_the_parts_of_a_sequence_make_it_whole(n: int, order: str, length: int) -> None:
    s = n * length * (2 if order == "zigzag" else 1)
    whole = torch.arange(2 * s).view(2, s)
    value = (whole, {"a": whole[..., None]}["a"], torch.arange(2))
    parts = [sequence_part(value, i, n, order) for i in range(n)]
    where = [positions_of(part[0].shape[1], pieces(i, n, order)) for i, part in enumerate(parts)]
    for part, positions in zip(parts, where, strict=True):
        assert torch.equal(part[0], whole[:, positions]) and torch.equal(part[1], part[0][..., None])
        assert part[2] is value[2]
    assert torch.cat(where).sort().values.tolist() == list(range(s))


WHOLE = torch.zeros(2, 24, dtype=torch.long)


@pytest.mark.parametrize(
    ("inputs", "targets", "n", "order", "said"),
    [
        (WHOLE, torch.zeros(2), 2, "contiguous", r"\[2, 24\], \[2\].*cp=1"),
        (WHOLE, WHOLE[:, 1:], 2, "contiguous", r"the same s; these have shapes \[2, 24\], \[2, 23\]"),
        (WHOLE, WHOLE, 5, "contiguous", r"s=20 or s=25 would do, or cp=4"),
        (WHOLE, WHOLE, 5, "zigzag", r"two pieces each, .* s=20 or s=30 would do, or cp=4"),
        (WHOLE, WHOLE, 24, "contiguous", r"two tokens a piece.* s=48 would do, or cp=12"),
        (WHOLE, WHOLE, 2, "striped", "'contiguous' or 'zigzag'"),
        ({"input_ids": WHOLE, "labels": WHOLE}, WHOLE, 2, "contiguous", "loses one target a part"),
        ({"input_ids": WHOLE, "attention_mask": WHOLE}, WHOLE, 2, "contiguous", "attention_mask hides tokens"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_shared_out(inputs: Any, targets: Any, n: int, order: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_sequences(inputs, targets, n, order)


def test_data_that_can() -> None:
    shown = {"input_ids": WHOLE, "attention_mask": torch.ones_like(WHOLE)}
    assert check_sequences(shown, WHOLE, 4) == check_sequences((WHOLE, WHOLE[..., None]), WHOLE, 4) == 24


# ---------------------------------------------------------------- models that cannot


class Attending(nn.Module):
    """Looks at its tokens with one function or another."""

    def __init__(self, attend: Callable[[Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.attend = attend
        self.parts = nn.ModuleDict(parts)
        self.embed = nn.Embedding(19, 8)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.attend(self.embed(input_ids))


class Unplaced(Attending):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.attend(self.embed(input_ids))


def plain(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def classes(x: Tensor) -> Tensor:
    return plain(x).mean(1)


def windowed(x: Tensor) -> Tensor:
    return plain(F.conv1d(x.mT, torch.ones(8, 8, 3), padding=1).mT)


def pointwise(x: Tensor) -> Tensor:
    return plain(F.conv1d(x.mT, torch.ones(8, 8, 1)).mT)


def masked(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, torch.ones(x.shape[1], x.shape[1]).tril().bool())


def with_a_mask_that_hides_nothing(x: Tensor) -> Tensor:
    every = torch.zeros(x.shape[1], x.shape[1])
    return F.scaled_dot_product_attention(x, x, x, every) + F.scaled_dot_product_attention(
        x, x, x, every == 0
    )


def dropping(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)


def again(x: Tensor) -> Tensor:
    return checkpoint(plain, x, use_reentrant=False)


def of_24_tokens(x: Tensor) -> Tensor:
    return plain(x + torch.ones(24, 8))


def multi(x: Tensor) -> Tensor:
    return plain(nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x, need_weights=False)[0])


def recurrent(x: Tensor) -> Tensor:
    return plain(nn.GRU(8, 8, batch_first=True)(x)[0])


def heads(x: Tensor) -> Tensor:
    few = x[:, None]
    return F.scaled_dot_product_attention(few.expand(-1, 4, -1, -1), few, few)[:, 0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Attending(classes), r"makes \[1, 8\], so what it says is about the sequence as a whole"),
        (lambda: Attending(windowed), "calls conv1d: a convolution or pooling"),
        (lambda: Attending(masked), r"takes no mask but is_causal, and was given one of shape \[12, 12\]"),
        (lambda: Attending(dropping), r"dropout_p=0.1: .*attn_pdrop=0"),
        (lambda: Attending(again), r"Plan\(recompute='full'\)"),
        (lambda: Attending(multi), "nn.MultiheadAttention or .* out of sight"),
        (lambda: Attending(recurrent), "a recurrent layer"),
        (lambda: Attending(heads), "4 heads of queries and 1 of keys need enable_gqa=True"),
        (lambda: Attending(nn.Identity()), "never calls .*scaled_dot_product_attention"),
        (lambda: Unplaced(plain), "no way to be told"),
        (lambda: llama(attn_implementation="eager"), "attn_implementation='sdpa'"),
        (lambda: gpt2(attn_pdrop=0.1), "attn_pdrop=0"),
        (lambda: Attending(of_24_tokens), r"shape \[1, 12\] at the end of sequences of 24 tokens: The size of"),
        (roberta, r"torch.arange\(s\).expand\(batch, s\) \+ padding_idx \+ 1"),
        (lambda: GPT(vocab=19, length=23, width=8, heads=1), "sequences of 24 tokens, and this GPT has length=23"),
    ],
)  # fmt: skip
def test_models_that_cannot(make: Callable[[], nn.Module], said: str) -> None:
    with quiet(), pytest.raises(ValueError, match=said):
        check_context_parallel(make(), *tokens(2, 24), 2)


def test_models_that_can() -> None:
    for attend in (plain, pointwise, with_a_mask_that_hides_nothing):
        model = Attending(attend)
        check_context_parallel(model, *tokens(2, 24), 2)
        assert not model._forward_pre_hooks


def test_zigzag_positions_of_a_decoder_without_cache_look_like_several_texts() -> None:
    with quiet(), pytest.raises(ValueError, match="order='contiguous' has none"):
        check_context_parallel(llama(use_cache=False), *tokens(2, 24), 2, "zigzag")


def test_one_token_a_rank_would_lose_its_mask() -> None:
    x = torch.zeros(1, 1, 1, 2)
    with ContextParallel(Pretended(2)), pytest.raises(ValueError, match="leave out the causal mask"):
        F.scaled_dot_product_attention(x, x, x)


def test_recomputing_within_is_refused() -> None:
    q, k, v = (torch.zeros(1, 1, 2, 2, requires_grad=True) for _ in range(3))
    with (
        ContextParallel(Pretended(2)),
        AttentionAgain(),
        pytest.raises(ValueError, match="enter it before ContextParallel"),
    ):
        F.scaled_dot_product_attention(q, k, v)


def test_alone_nothing_changes() -> None:
    x = torch.randn(1, 2, 4, 2)
    with ContextParallel(Pretended(1)) as mode:
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), plain(x))
        assert torch.equal(F.avg_pool1d(x[0], 2), F.avg_pool1d(x[0], 2))
    mode.check_used()
