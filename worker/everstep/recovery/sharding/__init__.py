"""What shards the state: the mesh, FSDP2 and tensor parallelism."""
