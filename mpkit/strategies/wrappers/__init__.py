"""mpkit's strategies as wrappers with torch's conventions, for a training loop of one's own.

ddp               `mk.ddp(module)`                 the whole model on each rank, gradients averaged in buckets
fully_shard       `mk.fully_shard(module, stage)`  ZeRO: optimizer states, gradients, parameters are sharded
zero_optimizer    `mk.zero_optimizer(cls, params)` each rank updates some of the parameters
tensor_parallel   `mk.tensor_parallel(module)`     each layer divided by width
pipeline          `mk.pipeline(module, schedule)`  stages on different ranks

What they share: `wrapper` (a module around the user's), `backward` (when a backward begins and ends), `replicas` (the
ranks that work together), `loop_proof` (the first steps
compared with plain PyTorch, `prove=`). The strategies themselves are those of `mpkit.strategies`.
"""
