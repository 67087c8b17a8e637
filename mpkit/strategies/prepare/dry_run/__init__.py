"""Running the model on fake tensors: shapes, FLOPs and bytes of each layer."""
