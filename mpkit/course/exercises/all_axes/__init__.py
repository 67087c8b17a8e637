"""All axes.

Pipeline stages, replicas and shards of a layer at once: the ranks are a box, and each communicates along its axes. Here
you make the groups, deal out the batch, shard the optimizer within a stage, and choose the degrees.
"""

TITLE = "All axes"
PLACE = 6
