"""Matmul: a product with a weight, of which the layers of an architecture consist."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Matmul"]


@dataclass(frozen=True, slots=True)
class Matmul:
    """A product of [tokens, k] and [k, n] matrices; or of experts, with one [k, n] matrix each.

    Attributes:
        name: the weight's role, such as "qkv".
        k, n: the sizes of the weight.
        divided: which of them tensor parallelism divides: "n" (by columns), "k" (by rows), "" (none).
        experts: 0, or the number of experts that have such a weight each.
        top_k: of these, the number that a token visits.
    """

    name: str
    k: int
    n: int
    divided: str = ""
    experts: int = 0
    top_k: int = 0

    @property
    def parameters(self) -> int:
        """Elements of the weight, of all experts."""
        return self.k * self.n * max(1, self.experts)

    @property
    def flops(self) -> float:
        """Floating-point operations of the forward per token."""
        return 2.0 * self.k * self.n * max(1, self.top_k)
