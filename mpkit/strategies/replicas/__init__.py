"""Replicas: ranks that hold the same part of the model, kept equal by DDP, or divided by ZeRO.

`mpkit.strategies.reference.bucketed_ddp` and `zero1` to `zero3` are the algorithms alone. Read in this order:

part          a rank's part of the model, and the ranks that hold the same
units         which parameters share a flat tensor, and the layers that use them
flat          parameters side by side in one tensor, cut into equal shards
reducer       gradients, from autograd to their sum over ranks: one for DDP and all stages of ZeRO
ddp           everything whole, gradients summed
zero          ZeRO-1, 2 and 3: optimizer states, gradients and parameters divided
gather        the hooks of ZeRO-3 that gather a layer's parameters around its forward and backward

`buffers`, `batchnorm` over the whole batch and `tied` weights of several stages keep the rest equal.
"""
