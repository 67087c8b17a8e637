"""Everything that is checked and counted before a rank starts. Begin with `prepare.py`.

prepare       arguments, resolve, checks, job: the four phases
arguments/    types and values of the arguments, the data that the steps use; `Task`, what the checks see of them
resolve/      from the Plan to the ResolvedPlan, and to what the trace records
dry_run/      copies of the model and runs on fake tensors: shapes, FLOPs, bytes
partition/    where a model that is no chain is cut
checks        the table; its rows are in `layers`, `hooks`, `recompute`, `outputs` and `resume`, and in
                  tensor_plan/   do the shards compute what the whole model computes?
                  optimizer/     is a step on parts of the model part of a step on the whole?
                  probe/         is a batch the sum of its parts?
proof_steps    which steps the run compares with serial training
plan_warnings  warnings
"""
