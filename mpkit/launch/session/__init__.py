"""What a notebook works with: a Cluster, and the Run that its `train` returns."""
