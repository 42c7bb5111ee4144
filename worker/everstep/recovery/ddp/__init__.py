"""DistributedDataParallel: its reducers in each round, and the uses of it that cannot be recovered."""
