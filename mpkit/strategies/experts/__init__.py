"""Expert parallelism: the experts of each layer divided over ranks, to which tokens travel and from which they return.

What comes in is a model, and the ranks that divide its experts. What goes out is the model with this rank's experts,
whose forward exchanges tokens with the other ranks. Begin with `divide`, after
`mpkit.strategies.reference.experts.expert_parallel`, which is the algorithm.
"""
