"""Simulated nodes, with the scheduler and the node controller of a cluster: start at `pool.LocalNodes`."""
