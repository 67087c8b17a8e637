"""Pipelines of models as people have them, which are no chains: without rewriting, with whatever goes between stages.

Every rank runs the model's own forward. The blocks of other stages are passed over: they answer with stand-ins, tensors
of the right shape without numbers. A dry run in the parent (`mpkit.prepare.opened`) has seen which values cross from
which stage to which: the stream, an encoder's states, a skip, a position bias. Those are the messages, and each goes
directly to the stage that needs it.

    structure   what goes from block to block: leaves, and how they are put together
    value       Value: a tensor that some stage makes; here, or only its stand-in
    walk        a forward in which the calls of blocks, and what happens between them, are seen
    graph       what the dry run saw, and how it is divided among stages; plain data
    forward     a stage's walk: its own nodes done, the others' passed over
    part        a stage: its forward, and the weights that its rank holds
    work        F, recomputation and the loss, as the runtime wants them

Why not a traced graph? torch.export and torch.fx (and torch.distributed.pipelining's tracer, which is made of the
former) turn the whole forward into operators, cut that, and run the pieces instead of the model. So whatever they
cannot trace, or would freeze, ends it: control flow on values, even on a mask that is an input (transformers asks
whether a mask hides anything, and goes another way if not); hooks; random numbers; batches of another size. Here
nothing within a block is traced, and nothing that follows from the inputs alone either: it runs, as it would without
mpkit. What must be the same every time is only which blocks are called with whose results. Recording operators by a
dispatch mode and replaying them, stage by stage, has the same limits as a trace, and loses the model's modules too.
The price: every rank runs the forward's Python between blocks, some microseconds an operation, and needs the inputs.
"""
