"""All axes.

Here a model has pipeline stages, replicas and shards of a layer at once: the ranks form a box, and each communicates
along its axes. Here you make the groups, deal out the batch, shard the optimizer within a stage, and choose the
degrees.
"""

TITLE = "All axes"
PLACE = 6
