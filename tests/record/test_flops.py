"""Counted FLOPs are those by hand, and counting leaves no trace."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpkit.trace.record.flops import count
from mpkit.trace.record.operators import _grouped_flops

B, T, H, HEADS = 2, 16, 64, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(H, 3 * H)
        self.out = nn.Linear(H, H)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(T)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        q, k, v = self.qkv(self.norm(x)).view(B, T, 3, HEADS, H // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.drop(self.out(y.transpose(1, 2).reshape(B, T, H)))


@pytest.mark.parametrize("wants", [False, True], ids=["data", "from the stage before"])
def test_a_linear_layer_costs_two_a_weight_a_row_and_bytes_once(wants: bool) -> None:
    k, n, rows = 3, 5, 7
    flops = count(nn.Linear(k, n), torch.zeros(rows, k, requires_grad=wants))
    assert flops.forward == 2 * rows * k * n
    assert flops.backward == (2 if wants else 1) * 2 * rows * k * n
    assert flops.forward_bytes == 4 * (k * n + n + rows * k + rows * n)  # weight, bias, input, output


def test_attention_is_counted_on_a_cpu_as_on_a_gpu() -> None:
    flops = count(Attention(), torch.zeros(B, T, H, requires_grad=True))
    linear = 2 * B * T * H * 4 * H
    scores = B * T * (T + 1) * H  # causal q k^T; as much again for the weighted sum of v
    assert flops.forward == linear + 2 * scores
    assert flops.backward == 2 * linear + 5 * scores  # flash attention computes the scores anew
    assert flops.layers["qkv"][0] == 0.75 * linear
    assert flops.layers["out"][0] == 0.25 * linear
    assert flops.attention[0] == 2 * scores


def test_fewer_heads_of_keys_than_of_queries_cost_as_much_as_repeated_ones() -> None:
    few, width = torch.zeros(B, 2, T, 8, requires_grad=True), nn.Linear(8, 8)

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = width

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(self.q(x), few, few, enable_gqa=True)

    flops = count(Grouped(), torch.zeros(B, HEADS, T, 8, requires_grad=True))
    linear, scores = 2 * B * HEADS * T * 8 * 8, 2 * B * HEADS * T * T * 8
    assert (flops.forward, flops.backward) == (linear + 2 * scores, 2 * linear + 5 * scores)


def test_inputs_and_outputs_may_be_dicts_and_tied_weights_count_twice() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 6, bias=False)
            self.down = nn.Linear(6, 6, bias=False)
            self.down.weight = self.up.weight

        def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"y": self.down(self.up(batch["x"])), "ids": batch["ids"]}

    inputs = {"x": torch.zeros(2, 6), "ids": torch.zeros(2, dtype=torch.long)}
    flops = count(Tied(), inputs)
    assert (flops.forward, flops.backward) == (2 * 144, 3 * 144)


def test_counting_changes_nothing() -> None:
    torch.manual_seed(1)
    model = Attention()
    before = copy.deepcopy(model.state_dict())
    versions = [b.data_ptr() for b in model.state_dict().values()]
    states = torch.get_rng_state()
    x = torch.ones(B, T, H, requires_grad=True)
    assert count(model, x).forward > 0
    assert x.grad is None
    assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())
    assert [b.data_ptr() for b in model.state_dict().values()] == versions
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert torch.equal(states, torch.get_rng_state())
    assert model.calls == 0
    assert model(x).isfinite().all()


def test_a_module_far_too_large_to_run_is_counted() -> None:
    with torch.device("meta"):
        model = nn.Linear(2**20, 2**20, bias=False)  # 4 TiB
    assert count(model, torch.empty(1, 2**20, device="meta")).forward == 2 * 2**40


def test_causal_attention_counts_what_is_attended_to() -> None:
    def attend(q: torch.Tensor, is_causal: bool) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=is_causal)

    queries = torch.zeros(1, 2, 16, 8, requires_grad=True)
    whole, causal = (count(partial(attend, is_causal=is_causal), queries) for is_causal in (False, True))
    assert causal.forward / whole.forward == causal.backward / whole.backward == 17 / 32


def test_a_grouped_product_multiplies_each_row_with_one_matrix() -> None:
    rows, matrices = torch.empty(10, 8), torch.empty(4, 8, 6)
    assert _grouped_flops(rows, matrices) == 2 * 10 * 8 * 6
    assert _grouped_flops(rows.expand(4, 10, 8), matrices) == 4 * 2 * 10 * 8 * 6
