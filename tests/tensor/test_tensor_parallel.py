"""Tensor parallelism: models sharded in place give the loss, the gradients and the text of the whole ones."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.comm.fake_group import FakeGroup
from mpkit.strategies.packing.world import installed_modules
from mpkit.strategies.program_calls.communication import ComparedFunction
from mpkit.strategies.stage.shard import HeldPart, put_together
from mpkit.strategies.tensor import shard_model
from tests.serial import Clusters

PLAIN: dict[str, Any] = {}
SEQUENCE = {"sequence": True}
SLOW = {"overlap": False}
SLOW_SEQUENCE = {"sequence": True, "overlap": False}


class Case(NamedTuple):
    """A model, a batch, a loss, and how it is sharded."""

    model: nn.Module
    inputs: Any
    targets: Tensor
    loss: Callable[[Any, Tensor], Tensor]
    how: dict[str, Any]

    def gradients(self, model: nn.Module) -> tuple[float, dict[str, Tensor | None]]:
        output = model(**self.inputs) if isinstance(self.inputs, dict) else model(self.inputs)
        value = self.loss(output, self.targets)
        value.backward()
        return value.item(), {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


def on_a_rank(ctx: Any, cases: list[Case]) -> Any:
    """Loss, gradients and shards of one rank."""
    found, line = [], ctx.comm
    for case in cases:
        sharded = shard_model(case.model, line, **case.how)
        value, gradients = case.gradients(case.model)
        for name in sorted(sharded.partial):
            if gradients[name] is not None:
                line.all_reduce(gradients[name])
        found.append((value, gradients, sharded.shards))
    return found


def run_with(models: list[nn.Module], cluster: mk.Cluster, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run as `cluster.run`, with the models' libraries imported once, before ranks are forked."""
    modules = [name for model in models for name in installed_modules(model)]
    launch = cluster.launch(ComparedFunction(fn), args, modules=modules)
    launch.finish()
    return launch.results()


def check_equal(clusters: Clusters, t: int, *cases: Case, rtol: float = 1e-8) -> None:
    """The ranks find the loss and the gradients of the whole model."""
    ranks = run_with([case.model for case in cases], clusters(t), on_a_rank, list(cases))
    for i, case in enumerate(cases):
        value, whole = case.gradients(copy.deepcopy(case.model))
        values, gradients, shards = zip(*(rank[i] for rank in ranks), strict=True)
        assert list(values) == pytest.approx([value] * t, rel=rtol)
        for name, expected in whole.items():
            found = [mine[name] for mine in gradients]
            if expected is None:
                assert found == [None] * t, name
                continue
            if name in shards[0]:
                found = [
                    put_together([HeldPart.of_shard(s[name], x) for s, x in zip(shards, found, strict=True)])
                ]
            for gradient in found:
                torch.testing.assert_close(
                    gradient, expected, rtol=rtol, atol=rtol / 100, msg=lambda m, n=name: f"{n}: {m}"
                )


def gpt2(**changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config: dict[str, Any] = {
        "n_layer": 2, "n_embd": 20, "n_head": 5, "vocab_size": 37, "n_positions": 16, "n_inner": 27,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 36,
    }  # fmt: skip
    return GPT2LMHeadModel(GPT2Config(**config | changes)).double()


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config: dict[str, Any] = {
        "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3,
        "intermediate_size": 31, "vocab_size": 37, "max_position_embeddings": 32, "bos_token_id": 0,
        "eos_token_id": 36, "pad_token_id": 35,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**config | changes)).double()


def bert(kind: str = "BertForMaskedLM", **changes: Any) -> nn.Module:
    import transformers

    config: dict[str, Any] = {
        "num_hidden_layers": 2, "hidden_size": 20, "num_attention_heads": 5, "intermediate_size": 33, "vocab_size": 37,
        "max_position_embeddings": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    return getattr(transformers, kind)(transformers.BertConfig(**config | changes)).double()


def next_word(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def of_states(output: Any, targets: Tensor) -> Tensor:
    return output.last_hidden_state.square().mean() + output.pooler_output.sin().sum()


def of_class(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, targets[:, 0] % 2)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens).logits * 2


def of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), targets)  # classes in the middle: gathered


def sentences(batch: int, length: int) -> tuple[dict[str, Tensor], Tensor]:
    lengths = torch.randint(1, length + 1, (batch, 1))
    mask = (torch.arange(length) < lengths).long()
    return {"input_ids": torch.randint(35, (batch, length)), "attention_mask": mask}, torch.randint(
        37, (batch, length)
    )


@pytest.mark.slow
def test_transformers(clusters: Clusters) -> None:
    torch.manual_seed(2)
    ways = ((gpt2, SEQUENCE), (llama, SEQUENCE), (llama, SLOW), (bert, PLAIN), (bert, SLOW_SEQUENCE))
    check_equal(clusters, 3, *(Case(make(), *sentences(3, 12), next_word, how) for make, how in ways))


@pytest.mark.slow
def test_other_heads_attentions_and_wrappers(clusters: Clusters) -> None:
    torch.manual_seed(3)
    inputs, targets = sentences(3, 12)
    upcast = gpt2(attn_implementation="eager", scale_attn_by_inverse_layer_idx=True)
    check_equal(
        clusters, 2,
        Case(bert("BertModel"), inputs, targets, of_states, SEQUENCE),
        Case(bert("BertForSequenceClassification"), inputs, targets, of_class, PLAIN),
        Case(llama(attn_implementation="eager"), inputs, targets, next_word, PLAIN),
        Case(bert(attn_implementation="eager"), inputs, targets, next_word, PLAIN),
        Case(upcast, inputs, targets, next_word, PLAIN),
        Case(Wrapper(gpt2()), inputs["input_ids"], targets, of_logits, SEQUENCE),
    )  # fmt: skip


class Grouped(nn.Module):
    """Attention whose query heads share keys, in one layer with them; queries are normalized, head by head."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.qkv = nn.Linear(width, (heads + 2 * groups) * self.size)
        self.query_norm = nn.LayerNorm(self.size)
        self.out = nn.Linear(width, width)

    def forward(self, *, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([n * self.size for n in (self.heads, self.groups, self.groups)], -1)
        q, k, v = (
            one.unflatten(-1, (-1, self.size)).transpose(1, 2) for one in (self.query_norm_of(q), k, v)
        )
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def query_norm_of(self, q: Tensor) -> Tensor:
        return self.query_norm(q.unflatten(-1, (-1, self.size))).flatten(-2)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(4, 12)
        self.norm = nn.LayerNorm(12)
        self.layers = nn.ModuleList(Grouped(12, 6, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for layer in self.layers:
            x = x + layer(x=self.norm(x))
        return x


def test_a_plan_for_a_model_of_ones_own(clusters: Clusters) -> None:
    torch.manual_seed(10)
    attention = mk.tensor.Region(
        "layers.*", ("layers.*.qkv",), "layers.*.out", "groups", (2, 1, 1), local=("heads", "groups")
    )
    x, y = torch.randn(3, 4, 4).double(), torch.randn(3, 4, 12).double()
    plan = mk.tensor.TensorPlan((attention,))
    cases = [Case(Layers().double(), x, y, F.mse_loss, {"plan": plan, **how}) for how in (PLAIN, SLOW)]
    check_equal(clusters, 3, *cases)
    # Each rank's queries are its own, and what normalizes them has a gradient of each.
    expected = {f"layers.{i}.query_norm.{name}" for i in range(2) for name in ("weight", "bias")}
    assert shard_model(Layers(), FakeGroup(2), plan).partial == expected


def generated(ctx: Any, model: nn.Module, tokens: Tensor, how: Any) -> Tensor:
    return mk.tensor_parallel(model).generate(tokens, **how)


def test_generation_is_the_whole_models(clusters: Clusters) -> None:
    torch.manual_seed(6)
    model = llama().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter)  # so that it does not say the same word for ever
    tokens = torch.randint(35, (2, 4))
    how = {
        "max_new_tokens": 9, "do_sample": False, "attention_mask": torch.ones_like(tokens), "pad_token_id": 35,
    }  # fmt: skip
    alone = model.generate(tokens, **how)
    assert alone.unique().numel() > 5
    for found in run_with([model], clusters(3), generated, model, tokens, how):
        assert torch.equal(found, alone)


def test_pairs_in_a_chain(clusters: Clusters) -> None:
    torch.manual_seed(8)
    model = nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 6), nn.LayerNorm(6),
        nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5, bias=False)), nn.Softmax(-1), nn.Linear(5, 1),
    ).double()  # fmt: skip
    plan = mk.tensor.find_tensor_plan(model)
    assert [(region.entry, region.row) for region in plan.regions] == [
        ("0", "2"),
        ("4.0", "4.2"),
        ("6", None),
    ]
    x, y = torch.randn(4, 5).double(), torch.randn(4, 1).double()
    one = nn.Linear(5, 7).double()
    check_equal(
        clusters, 3, Case(model, x, y, F.mse_loss, PLAIN),
        Case(one, x, x.repeat(1, 2)[:, :7], F.mse_loss, PLAIN),
    )  # fmt: skip
