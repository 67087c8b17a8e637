"""A program's own calls of torch.distributed: recorded, and compared between ranks."""
