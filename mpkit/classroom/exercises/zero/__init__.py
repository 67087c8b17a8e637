"""ZeRO.

Data parallelism gives every rank 16 bytes a parameter, and all ranks the same. ZeRO keeps one copy among all ranks:
first of the optimizer states, then of the gradients, then of the parameters. Here you write the three stages, count
their bytes, and meet the places where a sharded training goes wrong.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

TITLE = "ZeRO"
PLACE = 3
