"""Comparisons of several runs, and reproductions of experiments from the literature.

scaling, memory_by_strategy    by ranks, by strategy
hugging_face                   the guide's three configurations
soap_...                       one layer split by sample, operator, attribute and parameter
operators_at_once              a layer norm's mean and standard deviation on two ranks at the same time
"""

from mpkit.prediction.experiments.hugging_face import hf_experiment
from mpkit.prediction.experiments.operators_at_once import mean_and_std_at_once
from mpkit.prediction.experiments.soap_splits import soap

__all__ = ["hf_experiment", "mean_and_std_at_once", "soap"]
