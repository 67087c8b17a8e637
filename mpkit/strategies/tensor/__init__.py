"""Tensor parallelism: layers divided over ranks.

operators     f, g and their sequence-parallel forms: communication in forward and backward
overlap       gradients of inputs are reduced while those of weights are computed
region        a running region: column layers, the modules in between, row layer
vocabulary    embedding, cross-entropy and logits with a divided vocabulary
known_plans   plans of known models
resolve       a plan's patterns matched with a model's names, and checked
shards        a model, sharded in place
"""

from mpkit.plan.tensor_plan import Region, TensorPlan
from mpkit.strategies.tensor.known_plans import find_tensor_plan
from mpkit.strategies.tensor.resolve import check
from mpkit.strategies.tensor.shards import ShardedModel, shard_model

__all__ = ["Region", "ShardedModel", "TensorPlan", "check", "find_tensor_plan", "shard_model"]
