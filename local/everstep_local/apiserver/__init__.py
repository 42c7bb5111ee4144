"""A Kubernetes API in memory: `cluster.MemoryCluster` is the cluster, `client` a connection to it."""
