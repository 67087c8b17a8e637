"""Tensor parallel.

One layer on several ranks: each has a part of the matrix, and all work on the same samples. Here you cut a matrix by
columns and by rows, then an MLP, attention and the loss, and count what has to be sent for it.

Sources: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019;
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023.
"""

TITLE = "Tensor parallel"
PLACE = 5
