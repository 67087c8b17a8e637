"""Ranks that a launcher has started (torchrun, srun, mpirun), on one machine or several: no fork server is involved.

environment     which rank this process is, from the launcher's variables; no further ranks start below a launcher
rendezvous      the store through which the processes find each other, and the interface they use
secret          what tells these processes from strangers who reach the store
signed_store    a store in which every value is signed
greeting        what each process tells the others of itself, and whether all have the same secret
node_devices    which device each of them is on
session         all processes as one cluster, and what they must have in common
run_folders     where the ranks of each node write, and the clocks of the nodes
sweeper         removes a folder whose process was killed
clock_offset    how far a node's clock is from rank 0's, measured over the store
packets         what a rank has recorded since the last packet
mirror          a copy of it on rank 0
monitor         a thread per process: heartbeats, packets, and the verdict that ends all ranks alike
verdict         how a launch ended, on its way to all processes
collector       rank 0's part of it: who is lost, who hangs, what the outcome is
own_rank        this process's own rank, and what the function returned on each
external_launch one launch, from the agreement to its outcome
"""
