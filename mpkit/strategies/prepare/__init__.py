"""Everything that is checked and counted before a rank starts. Begin with `prepare.py`.

prepare       arguments, resolve, checks, job: the four phases
arguments/    types and values of the arguments, the data that the steps use; `Task`, what the checks see of them
resolve/      from the Plan to the ResolvedPlan, and to what the trace records
dry_run/      copies of the model and runs on fake tensors: shapes, FLOPs, bytes
partition/    where a model that is no chain is cut
checks        the table; its rows are in `layers`, `hooks`, `recompute`, `outputs` and `resume`, and in
                  optimizer/     is a step on parts of the model part of a step on the whole?
loss_form      how ranks call the loss of a part of the batch
proof_steps    which steps the run compares with serial training
plan_warnings  warnings
"""
