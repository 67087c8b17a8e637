"""What a stage computes for a micro-batch, recorded; pipelines and nn.DataParallel's ranks both compute so.

stage_work      the order: F, recomputation, and B or its two halves, I and W
stage_forward   what F computes: the layers of a stage; at the last stage, the micro-batch's share of the loss
"""
