"""mpkit's strategies as wrappers with torch's conventions, for a training loop of one's own.

data_parallel     `mk.ddp(module)`                 the whole model on each rank, gradients averaged in buckets
tensor_parallel   `mk.tensor_parallel(module)`     each layer divided by width
pipeline          `mk.pipeline(module, schedule)`  stages on different ranks
prove             `mk.prove(module, plain)`        any wrapped module, torch's too, compared with the plain one

What they share is in `wrapper`, and what a rank's part of a model needs in `divided`. The strategies themselves are
those of `mpkit.strategies`; the comparison is `mpkit.strategies.proof.loop`.
"""
