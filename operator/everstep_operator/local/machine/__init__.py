"""Simulated nodes whose kubelets run pods as processes of this machine: start at `node_pool.LocalNodes`."""
