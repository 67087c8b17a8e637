"""What a rank records about itself while it runs: operations, memory, FLOPs."""
