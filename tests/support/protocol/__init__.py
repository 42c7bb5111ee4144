"""The protocol of docs/adr/0001 as an executable model: every interleaving within stated bounds, and its invariants.

`cluster` is Kubernetes and the operators, `log` is the object store and the writers, `whole` couples the two.
"""
