"""Each strategy once, in plain PyTorch on `ctx.comm`: what its paper says, and no more.

    serial               what all of the others have to equal
    pipelines            naive_model_parallelism, gpipe, one_f_one_b; stage is
                         what they share
    data parallelism     dp, naive_ddp, bucketed_ddp
    ZeRO                 zero1, zero2, zero3; hybrid_shards within groups of ranks
    tensor parallelism   tensor/: conjugates, column_parallel_linear,
                         row_parallel_linear, parallel_mlp, parallel_attention,
                         vocabulary_cross_entropy, sequence_parallel
    long sequences       ring_attention, ulysses
    experts              experts/: mixture_of_experts, exchange, expert_parallel,
                         balance
    a mesh               two_dimensions

Read one from its docstring down: the phases there come back as comments in the code, in
the same order, and the symbols are the paper's. What `mpkit.strategies` adds to each
(ties, uneven shares, frozen weights, offload, overlap) is left out. Tests hold each to
serial training, and to what the plan of the same name sends.

To run one: `cluster.run(mpkit.strategies.reference.zero2.train, model, batches, loss,
optimizer)`; for a pipeline, `cluster.run(mpkit.strategies.reference.stage.train, gpipe,
stages, batches, loss, optimizer, boundary, m)`.
"""
