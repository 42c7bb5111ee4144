"""Handles sharded state: the mesh, FSDP2 and tensor parallelism."""
