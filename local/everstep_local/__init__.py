"""Local mode: a Kubernetes API in memory, nodes whose pods are processes, and `everstep run` on top of both."""

from everstep.version import __version__ as __version__
