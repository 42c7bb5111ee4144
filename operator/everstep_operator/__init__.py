"""Everstep's operator. Start reading at `main`; its decisions are in `plan`."""

from everstep.version import __version__ as __version__
