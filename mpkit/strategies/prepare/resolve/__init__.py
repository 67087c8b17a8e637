"""What each rank would hold and compute: stages, local models, and their FLOPs and shapes."""
