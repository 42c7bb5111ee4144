"""The version of all distributions, in the one place from which their builds read it."""

__version__ = "0.1.0.dev0"
