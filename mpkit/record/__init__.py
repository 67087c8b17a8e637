"""What a rank writes down about itself while it runs: operations, memory, FLOPs."""
