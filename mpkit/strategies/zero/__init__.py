"""ZeRO, stages 1 to 3. Read them in this order; `mpkit.strategies.reference.zero1` to `zero3` are the algorithms alone.

zero1       P_os: gradients are reduced once per step, and updated shards gathered
zero2       P_os+g: each backward's gradients are reduced at once
zero3       P_os+g+p: a layer's parameters are gathered for its forward and its backward
offload     stage 3 with its shards in the host's memory
stages      which of them a plan asks for
shard       ZeRO for your own training loop

What they share:

zero               states in flat tensors, of which each replica updates its shard
units              flatten: which parameters share a flat tensor, and the layers that use them
flat               flatten: parameters side by side in one tensor, cut into equal shards
gradients          reduce: a unit's gradients, accumulated whole or sharded
reducer            reduce: in which order, while the backward goes on
gather             gather: the hooks of stage 3 around forward and backward
prefetch           gather: which layers are next
residency          gather: what is whole at the moment, and a parameter while it is not gathered
"""

from mpkit.strategies.zero.shard import shard
from mpkit.strategies.zero.stages import zero_sync
from mpkit.strategies.zero.zero import Zero

__all__ = ["Zero", "shard", "zero_sync"]
