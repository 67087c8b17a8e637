"""A mixture of experts: the layer (`mixture`), and what keeps its experts equally busy (`routing`)."""

from mpkit.strategies.models.experts.mixture import Experts, MixtureOfExperts, SharedExperts, count_rows

__all__ = ["Experts", "MixtureOfExperts", "SharedExperts", "count_rows"]
