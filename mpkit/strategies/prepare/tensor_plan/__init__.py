"""Whether the shards of a TensorPlan compute what the whole model computes."""
