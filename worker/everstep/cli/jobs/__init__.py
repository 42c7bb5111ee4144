"""Commands about jobs, `everstep list`, `status`, `logs` and their kin: one set for clusters and local runs.

`source.py` is what they ask, `cluster.py` asks a cluster's API server, and everstep-local asks runs of this machine.
"""
