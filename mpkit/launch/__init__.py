"""Starting ranks, watching them, and handling their failures; what a notebook holds while they run.

In     a function or a prepared training, and how many ranks on which devices.
Out    results by rank, a `Run` with its trace, or one error that says which rank failed where.
Begin  with `session/cluster.py` (Cluster, Run), then `launch.py` (one launch, from payload to outcome).

process/     code that runs in the fork server and in each rank
hang/        detects ranks that wait for each other forever, and explains which waits for which
torchrun.py  processes that a launcher such as torchrun has started; launched_rank.py: one launch on them
watch/       any torch program, watched; notebook/: `%%ranks`; doctor/: what is wrong with this machine

May import  `common`, `trace`, `plan`, `devices`, `timeline`, `strategies`.
"""
