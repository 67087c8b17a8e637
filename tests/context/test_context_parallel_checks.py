"""What cannot be shared out along the sequence: said before any rank starts, in words and with what would work."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mpkit.plan.plan import Plan
from mpkit.strategies.comm.fake_group import FakeGroup
from mpkit.strategies.context.divided_attention import ContextParallel
from mpkit.strategies.context.sequence import ORDERS, check_sequences, pieces, positions_of, sequence_part
from mpkit.strategies.models.gpt import GPT
from mpkit.strategies.prepare.isolation import quiet
from mpkit.strategies.prepare.sample import observe_sample

SIZES: dict[str, Any] = {
    "vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
TOKENS = torch.full((2, 24), 2)


def llama(**how: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, **how))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=19, n_positions=32, n_embd=16, n_layer=2, n_head=2))


def roberta() -> nn.Module:
    from transformers import RobertaConfig, RobertaForMaskedLM

    return RobertaForMaskedLM(RobertaConfig(**SIZES, max_position_embeddings=34, pad_token_id=1))


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


@pytest.mark.parametrize(("inputs", "targets", "n", "order", "said"), [
    (WHOLE, torch.zeros(2), 2, "contiguous", r"\[2, 24\], \[2\].*cp=1"),
    (WHOLE, WHOLE[:, 1:], 2, "contiguous", r"the same s; these have shapes \[2, 24\], \[2, 23\]"),
    (WHOLE, WHOLE, 5, "contiguous", r"s=20 or s=25 would do, or cp=4"),
    (WHOLE, WHOLE, 5, "zigzag", r"two pieces each, .* s=20 or s=30 would do, or cp=4"),
    (WHOLE, WHOLE, 24, "contiguous", r"two tokens a piece.* s=48 would do, or cp=12"),
    (WHOLE, WHOLE, 2, "striped", "'contiguous' or 'zigzag'"),
    ({"input_ids": WHOLE, "labels": WHOLE}, WHOLE, 2, "contiguous", "loses one target a part"),
    ({"input_ids": WHOLE, "attention_mask": WHOLE}, WHOLE, 2, "contiguous", "attention_mask hides tokens"),
])  # fmt: skip
def test_data_that_cannot_be_shared_out(inputs: Any, targets: Any, n: int, order: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_sequences(inputs, targets, n, order)


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


def with_a_memory(x: Tensor) -> Tensor:
    keys = F.pad(x, (0, 0, 2, 0))
    return F.scaled_dot_product_attention(x, keys, keys)


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


@pytest.mark.parametrize(("make", "said"), [
    (lambda: Attending(classes), r"makes \[1, 8\], so what it says is about the sequence as a whole"),
    (lambda: Attending(windowed), "calls conv1d: a convolution or pooling"),
    (lambda: Attending(masked), r"takes no mask but is_causal, and was given one of shape \[12, 12\]"),
    (lambda: Attending(with_a_memory), r"12 queries and 14 keys. .*What works: cp=1"),
    (lambda: Attending(dropping), r"dropout_p=0.1: .*attn_pdrop=0"),
    (lambda: Attending(again), r"Plan\(recompute='full'\)"),
    (lambda: Attending(multi), "nn.MultiheadAttention or .* out of sight"),
    (lambda: Attending(recurrent), "a recurrent layer"),
    (lambda: Attending(heads), "4 heads of queries and 1 of keys need enable_gqa=True"),
    (lambda: Attending(nn.Identity()), "never calls .*scaled_dot_product_attention"),
    (lambda: Unplaced(plain), "no way to be told"),
    (lambda: llama(attn_implementation="eager"), "attn_implementation='sdpa'"),
    (gpt2, "dropout_p=0.1: .*attn_pdrop=0"),
    (lambda: Attending(of_24_tokens), r"shape \[1, 12\] at the end of sequences of 24 tokens: RuntimeError: The "),
    (roberta, r"torch.arange\(s\).expand\(batch, s\) \+ padding_idx \+ 1"),
    (lambda: GPT(vocab=19, length=23, width=8, heads=1), "sequences of 24 tokens, and this GPT has length=23"),
])  # fmt: skip
def test_models_that_cannot(make: Callable[[], nn.Module], said: str) -> None:
    with quiet(), pytest.raises(ValueError, match=said):
        observe_sample(make(), (TOKENS, TOKENS), Plan(cp=2))


def test_models_that_can() -> None:
    for attend in (plain, pointwise, with_a_mask_that_hides_nothing):
        model = Attending(attend)
        observe_sample(model, (TOKENS, TOKENS), Plan(cp=2))
        assert not model._forward_pre_hooks


def test_one_token_a_rank_would_lose_its_mask() -> None:
    x = torch.zeros(1, 1, 1, 2)
    with ContextParallel(FakeGroup(2)), pytest.raises(ValueError, match="leave out the causal mask"):
        F.scaled_dot_product_attention(x, x, x)
