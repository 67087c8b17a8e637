"""Architecture: the sizes of a transformer, from which its parameters and FLOPs follow.

    attention    multi-head, grouped-query (fewer key and value heads), or latent (MLA: DeepSeek-V2, section 2.1)
    MLP          two matrices, or three where it is gated (SwiGLU: Shazeer 2020); or experts of which each token
                 visits top_k (Shazeer et al. 2017), beside shared ones that every token visits
    head         one matrix from hidden to vocabulary, or the embedding itself where they are tied

A decoder of a translation model (T5) attends twice, to itself and to the encoder: its layers have `cross` set.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Matmul:
    """A product of [tokens, k] and [k, n] matrices, or of experts that have one [k, n] matrix each."""

    name: str  # the weight's role, such as "qkv"
    k: int
    n: int
    divided: str = ""  # what tensor parallelism divides: "n" (columns), "k" (rows) or "" (nothing)
    experts: int = 0  # the number of experts that have such a weight
    top_k: int = 0  # the number of experts that a token visits

    @property
    def parameters(self) -> int:
        """Elements of the weight, of all experts."""
        return self.k * self.n * max(1, self.experts)

    @property
    def flops(self) -> float:
        """Floating-point operations of the forward per token."""
        return 2.0 * self.k * self.n * max(1, self.top_k)


OF_EXPERTS = "top_k", "expert_ffn", "shared_ffn", "dense", "whole_experts"  # sizes that only experts have
BARE = "router", "shared up", "shared down"  # products that have no bias, whatever the model says


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes of a transformer; a size of 0 follows from the others.

    >>> llama = Architecture(32, 4096, 32, kv_heads=8, ffn=14336, vocabulary=128256, gated=True)
    >>> round(llama.parameters / 1e9, 2)
    8.03
    """

    layers: int
    hidden: int  # the width of the residual stream, h
    heads: int  # attention heads, a
    kv_heads: int = 0  # key and value heads; 0: as many as heads
    ffn: int = 0  # the width inside the MLP; 0: 4 h
    vocabulary: int = 0  # V; for a model of images, the classes
    gated: bool = False  # whether the MLP has a third matrix, which gates
    causal: bool = True  # whether a token sees only those before it
    tied: bool = False  # whether the head is the embedding
    bias: bool = False  # whether products add a bias
    positions: int = 0  # learned positions; 0: none (rotary or ALiBi)
    head_dim: int = 0  # the width of a head; 0: h / a
    patch: int = 0  # numbers per image patch, which a product embeds; 0: tokens
    encoder: int = 0  # the number of encoder layers; the other layers attend to them too (T5)
    experts: int = 0  # experts per layer
    top_k: int = 0  # experts that a token visits
    expert_ffn: int = 0  # the width of an expert; 0: ffn
    shared_ffn: int = 0  # the width of the experts that every token visits
    dense: int = 0  # the number of first layers without experts
    whole_experts: bool = False  # whether tensor parallelism leaves routed experts whole (GPT-OSS)
    q_rank: int = 0  # q_rank and kv_rank: the ranks of latent attention
    kv_rank: int = 0
    rope_dim: int = 0  # the rotary part of its queries and keys
    v_dim: int = 0  # the width of its values
    qk_norm: bool = False  # whether queries and keys are normalized (Qwen3)
    name: str = ""

    def __post_init__(self) -> None:
        for field in fields(self)[:-1]:
            value, least = getattr(self, field.name), int(field.name in ("layers", "hidden", "heads"))
            if not isinstance(value, int) or value < least or (least and isinstance(value, bool)):
                raise ValueError(
                    f"Architecture({field.name}={value!r}): {field.name} is a whole number, {least} or more, such as "
                    "Architecture(layers=32, hidden=4096, heads=32, vocabulary=32000)"
                )
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ValueError(
                f"Architecture(experts={self.experts}, top_k={self.top_k}): each token visits top_k of them, 1 to "
                f"{self.experts}, such as top_k={min(2, self.experts)}"
            )
        if not self.experts and (odd := [name for name in OF_EXPERTS if getattr(self, name)]):
            raise ValueError(
                f"Architecture({odd[0]}={getattr(self, odd[0])}): {odd[0]} says something of experts, and experts=0; "
                f"with eight of them, experts=8, top_k={self.top_k or 2}"
            )
        if not self.head_dim and self.hidden % self.heads:
            raise ValueError(
                f"Architecture(hidden={self.hidden}, heads={self.heads}): heads share the hidden size equally, so "
                "heads divides it; or give head_dim, the width of one head"
            )
        width = self.head_dim or self.hidden // self.heads
        derived = {"kv_heads": self.heads, "ffn": 4 * self.hidden, "head_dim": width, "v_dim": width}
        for name, value in derived.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"Architecture(heads={self.heads}, kv_heads={self.kv_heads}): several heads share one key and value "
                "head, so kv_heads divides heads"
            )

    # ---- weights

    @property
    def qk_dim(self) -> int:
        """The width of a query and a key; in latent attention the rotary part comes on top."""
        return self.head_dim + (self.rope_dim if self.kv_rank else 0)

    def attention(self) -> Iterator[Matmul]:
        """Yield the products of an attention's weights."""
        h, a, d = self.hidden, self.heads, self.head_dim
        if not self.kv_rank:
            yield Matmul("qkv", h, (a + 2 * self.kv_heads) * d, "n")
        else:
            if self.q_rank:
                yield Matmul("q down", h, self.q_rank)
                yield Matmul("q up", self.q_rank, a * self.qk_dim, "n")
            else:
                yield Matmul("q", h, a * self.qk_dim, "n")
            yield Matmul("kv down", h, self.kv_rank + self.rope_dim)
            yield Matmul("kv up", self.kv_rank, a * (d + self.v_dim), "n")
        yield Matmul("attention out", a * self.v_dim, h, "k")

    def mlp(self, layer: int = 0) -> Iterator[Matmul]:
        """Yield the products of an MLP's weights, or after the first `dense` layers of the router and the experts."""
        h, gate = self.hidden, 2 if self.gated else 1
        if not self.experts or layer < self.dense:
            yield Matmul("mlp up", h, gate * self.ffn, "n")
            yield Matmul("mlp down", self.ffn, h, "k")
            return
        wide = self.expert_ffn or self.ffn
        yield Matmul("router", h, self.experts)
        yield Matmul("experts up", h, gate * wide, "n", self.experts, self.top_k)
        yield Matmul("experts down", wide, h, "k", self.experts, self.top_k)
        if self.shared_ffn:
            yield Matmul("shared up", h, gate * self.shared_ffn, "n")
            yield Matmul("shared down", self.shared_ffn, h, "k")

    def visits(self, layer: int = 0) -> int:
        """Return how many experts of a layer a token visits; 0 if it has none."""
        return self.top_k if self.experts and layer >= self.dense else 0

    def matmuls(self, layer: int = 0) -> tuple[Matmul, ...]:
        """Return a layer's products with weights."""
        return _matmuls(self, layer)

    # ---- parameters

    def layer_parameters(self, layer: int = 0) -> int:
        """Return the parameters of a layer, with its norms and biases."""
        products = self.matmuls(layer)
        norms = (3 if self.encoder and layer >= self.encoder else 2) * (1 + self.bias) * self.hidden
        biases = sum(m.n for m in products if not (m.experts or m.name in BARE)) if self.bias else 0
        return sum(m.parameters for m in products) + norms + biases + self.q_rank + self.kv_rank

    def expert_parameters(self, layer: int = 0) -> int:
        """Return the parameters of a layer's experts, without those that all tokens visit."""
        return sum(m.parameters for m in self.matmuls(layer) if m.experts)

    def divided_parameters(self, layer: int = 0) -> int:
        """Return a layer's parameters that tensor parallelism divides, without experts; norms and routers are whole."""
        products = [m for m in self.matmuls(layer) if m.divided and not m.experts]
        biases = sum(m.n for m in products if m.divided == "n" and m.name not in BARE) if self.bias else 0
        return sum(m.parameters for m in products) + biases

    @property
    def embedding_parameters(self) -> int:
        """The parameters before the first layer: of tokens or patches, and of positions."""
        return (self.patch or self.vocabulary) * self.hidden + self.positions * self.hidden

    @property
    def whole_at_edges(self) -> tuple[int, int]:
        """The parameters before the first and after the last layer that tensor parallelism leaves whole."""
        return self.positions * self.hidden, (1 + self.bias) * self.hidden

    @property
    def head_in_layers(self) -> float:
        """The head's matrix, its own or the embedding, as a number of layers of the first kind."""
        return self.vocabulary * self.hidden / sum(product.parameters for product in self.matmuls(0))

    @property
    def head_parameters(self) -> int:
        """The parameters after the last layer: its norm and the head, unless that is the embedding."""
        return (0 if self.tied else self.vocabulary * self.hidden) + (1 + self.bias) * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, psi."""
        layers = sum(count * self.layer_parameters(layer) for layer, count in self.kinds())
        return self.embedding_parameters + layers + self.head_parameters

    def kinds(self) -> tuple[tuple[int, int], ...]:
        """Return each kind of layer as the number of its first layer and its count: ((0, 3), (3, 58)) with dense=3."""
        return _kinds(self.layers, self.dense, self.encoder)

    # ---- FLOPs

    def forward_flops(self, sequence: int, *, causal: bool | None = None) -> float:
        """Return the floating-point operations of a forward per sequence: products with weights, attention and head.

        Training takes three times as many, and a fourth share where everything is recomputed. `causal` says whether
        to count only the pairs that a causal attention needs; None: as the model has it. Model FLOPs utilization is
        mostly counted with False (Chowdhery et al., "PaLM", 2022, appendix B).
        """
        half = 0.5 if (self.causal if causal is None else causal) else 1.0
        per_layer = 2.0 * sequence**2 * self.heads * (self.qk_dim + self.v_dim) * half
        total = 0.0
        for layer, count in self.kinds():
            weights = sum(m.flops for m in self.matmuls(layer)) * sequence
            twice = 2 if self.encoder and layer >= self.encoder else 1
            total += count * (weights + twice * per_layer)
        return total + 2.0 * sequence * self.hidden * self.vocabulary


@lru_cache(1024)
def _matmuls(model: Architecture, layer: int) -> tuple[Matmul, ...]:
    crossed = model.attention() if model.encoder and layer >= model.encoder else ()
    return (*model.attention(), *crossed, *model.mlp(layer))


@lru_cache(256)
def _kinds(layers: int, dense: int, encoder: int) -> tuple[tuple[int, int], ...]:
    borders = sorted({0, min(dense, layers), min(encoder, layers), layers})
    return tuple((start, end - start) for start, end in pairwise(borders))
