"""DistributedDataParallel: its reducers in each round, and what of it cannot be recovered."""
