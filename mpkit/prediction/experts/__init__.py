"""Where experts should be: DeepSeek's load balancer, and what its placement would do to the rows of a run.

In     the rows that each expert of each layer computed (`Run.expert_load`), and the number of slots, nodes and GPUs.
Out    which expert each slot holds, the load of each GPU before and after, and the weights that move.
Begin  with `load_balancer.py`, the algorithm; `expert_balance.py` applies it to a run.
"""
