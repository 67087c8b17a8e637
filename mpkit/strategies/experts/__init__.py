"""Expert parallelism: ranks divide each layer's experts; tokens travel to them and back.

`mpkit.strategies.reference.experts.expert_parallel` is the algorithm, `divide` applies it to a model.
"""
