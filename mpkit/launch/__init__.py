"""Starting ranks, and handling their failures.

launch           the parent's half: one launch, from the payload to its outcome
failure          turns what failed ranks left behind into an instructive error
output_reader    reads what ranks print, line by line

process/         code that runs in the fork server and in each rank
hang/            detects ranks that wait for each other forever, and explains which waits for which
external/        ranks that a launcher such as torchrun has started, on one machine or several
"""
