"""What a stage computes for a micro-batch, recorded; pipelines and nn.DataParallel's ranks both compute so.

stage_work      the order: F, recomputation, and B or its two halves, I and W
stage_forward   what F computes: the layers of a chain's stage; at the last stage, the loss
part_forward    the same for a stage of a partitioned model
loss_share      a micro-batch's share of the loss of the batch
kept            what a forward keeps for its backward
stage_record    FLOPs and bytes of each computation, and the activations that it saves
"""
