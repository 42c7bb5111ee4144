"""A Kubernetes API in memory. `cluster.MemoryCluster` is the cluster, and `client` a connection to it."""
