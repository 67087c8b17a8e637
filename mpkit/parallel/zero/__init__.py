"""ZeRO, stages 1 to 3.

flat        parameters side by side in one tensor, cut into equal shards
units       which parameters lie in one, and the layers that use them
gradients   P_g: reduced to their shards while the backward goes on
gather      P_p: gathered just before use, freed after
sharded     what a parameter is meanwhile
replica     Zero: all of it together
"""

from mpkit.parallel.zero.replica import Zero, shard

__all__ = ["Zero", "shard"]
