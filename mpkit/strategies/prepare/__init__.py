"""Everything that is checked and counted before a rank starts. Begin with `prepare.py`.

prepare        arguments, resolve, checks, job: the four phases
arguments      types and values of the arguments; `batches`, the data that the steps use
resolve        from the Plan to the ResolvedPlan, by way of the model as a rank holds it
observe        one run of the model on fake tensors: shapes, FLOPs, bytes; `sample`, what a sample's ranks exchange
copies         copies of the model, and runs of these; `isolation`, running it without side effects
partition      where a model that is no chain is cut: `blocks`, `record`; `find_cut` for `mk.find_cut`
checks         the table of what only a check can stop; `optimizer`, what ranks may give it
loss_form      how ranks call the loss of a part of the batch
proof_steps    which steps the run compares with serial training, which stops all else
metadata       what the trace records; `resume`, the checkpoint that a training goes on from
"""
