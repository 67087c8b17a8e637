"""A Timeline is a Trace put on a clock: figures, idle causes, diagnosis; simulation; traces of torch.profiler.

In     a `Trace`, or a schedule alone; for a replay, a `Hardware`.
Out    a `Timeline`: spans on a clock, with its bubble, its step time, memory and traffic, and why ranks wait.
Begin  with `timeline.py`, then `dependencies/` (a step as a graph of who waits for whom).
May import  `common`, `trace`, `plan`, `devices`.

The clocks:

    virtual      each rank has a device of its own; an operation takes the CPU time of its thread, or on other hardware
                 what its FLOPs and bytes cost; a collective starts when its last member has come
    measured     the wall clock; CUDA events on GPUs. On CPU ranks that share cores it says little about a pipeline
    simulated    the virtual clock, fed from a schedule without processes
    counted      `mk.trace_fake`: strategy code on fake tensors, each kernel priced on the device that is asked for

Loading takes the wall time until a rank's samples were there, on every clock.
"""
