"""Commands about jobs, `everstep list`, `status`, `logs` and their kin: one set for clusters and local runs.

What they ask is in `everstep.jobs`; everstep-local asks runs of this machine.
"""
