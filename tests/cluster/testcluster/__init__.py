"""The test cluster: everything between a bare machine and a working multi-node Kubernetes.

Standard library only, because `cluster.py` runs with the system's Python before any virtual environment exists.
It may not know the project it tests, except in `project.py` (its Dockerfile) and `pybases.py` (its requirements).
"""
