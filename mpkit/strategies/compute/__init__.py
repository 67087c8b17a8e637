"""A stage's computations for a micro-batch, recorded, in pipelines and on nn.DataParallel's ranks.

stage_work      F, recomputation, and B or its two halves, I and W
stage_forward   F: the layers of a stage; at the last stage, the micro-batch's share of the loss
"""
