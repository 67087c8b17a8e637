"""ZeRO, stages 1 to 3.

flat        parameters side by side in one tensor, cut into equal shards
units       which parameters share a flat tensor, and the layers that use them
gradients   P_g: reduced to their shards while the backward goes on
gather      P_p: gathered just before use, freed after
sharded     a parameter while it is not gathered
zero        `Zero`, which combines all of these
shard       ZeRO for your own training loop
"""

from mpkit.parallel.zero.shard import shard
from mpkit.parallel.zero.zero import Zero

__all__ = ["Zero", "shard"]
