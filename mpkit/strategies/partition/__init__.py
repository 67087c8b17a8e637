"""Pipelining real models, which are not chains: without rewriting them, whatever is passed between stages.

Every rank runs the model's own forward. The blocks of other stages are skipped: they return stand-ins, tensors of the
right shape without values. A dry run in the parent (`mpkit.strategies.prepare.partition`) has recorded which values
cross from which stage to which: the residual stream, an encoder's states, a skip, a position bias. Those are the
messages, and each is sent directly to the stage that needs it.

    boundary    what a layer makes of a micro-batch, and what crosses from stage to stage
    value       Value: a tensor that some stage makes; on this rank itself, or only as a stand-in
    walk        a forward in which the calls of blocks, and the operations between them, are intercepted
    graph       what the dry run recorded, and how it is divided among stages; plain data
    forward     a stage's walk: its own nodes are run, the others' skipped

`mpkit.strategies.models.nested_values` takes apart what is passed from block to block,
`mpkit.strategies.stage.partitioned_stage` is a stage, and `mpkit.strategies.compute.stage_forward` computes it.

Why not a traced graph? torch.export and torch.fx (and torch.distributed.pipelining's tracer, which is built on the
former) turn the whole forward into operators, cut that, and run the pieces instead of the model. So they fail on
whatever they cannot trace, or would freeze: control flow on values, even on a mask that is an input (transformers asks
whether a mask hides anything, and branches on it); hooks; random numbers; batches of another size. Here nothing within
a block is traced, and neither is what follows from the inputs alone: it runs as it would without mpkit. Only which
blocks are called, and with whose results, must be the same every time. Recording operators with a dispatch mode and
replaying them, stage by stage, has the same limits as a trace, and loses the model's modules too. The price: every
rank runs the forward's Python between blocks, some microseconds per operation, and needs the inputs.
"""
