"""Tensor parallelism: layers divided over ranks.

operators     f, g, their sequence-parallel forms: what forward and backward communicate
overlap       gradients of inputs travel while those of weights are computed
draws         random numbers inside of a region
region        column, what is between, row: at work
vocabulary    embedding and cross-entropy, by tokens
logits        logits whose vocabulary is divided, and any loss
sequence      what is between regions, by tokens of the sequence
finding       plans of known models
resolve       a plan's patterns against a model's names, checked
sharding      a model, sharded in place
by_hand       the same in a function of one's own
"""

from mpkit.parallel.tensor.by_hand import tensor_parallel
from mpkit.parallel.tensor.finding import find_tensor_plan
from mpkit.parallel.tensor.resolve import check
from mpkit.parallel.tensor.sharding import Sharded, shard_model

__all__ = ["Sharded", "check", "find_tensor_plan", "shard_model", "tensor_parallel"]
