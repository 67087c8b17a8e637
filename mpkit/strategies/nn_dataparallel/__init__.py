"""torch.nn.DataParallel's strategy: rank 0 holds the model and the data, and distributes both for each batch."""
