"""Comparisons of several runs, and reproductions of experiments from the literature.

scaling, memory_by_strategy    by ranks, by strategy
hugging_face                   the guide's three configurations
soap_...                       one layer split by sample, operator, attribute and parameter
"""

from mpkit.experiments.hugging_face import hf_experiment
from mpkit.experiments.soap_splits import soap

__all__ = ["hf_experiment", "soap"]
