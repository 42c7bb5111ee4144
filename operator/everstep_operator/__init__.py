"""Everstep's operator: start at `main`; what it decides is in `plan`."""

from everstep.version import __version__ as __version__
