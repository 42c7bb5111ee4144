"""Adapters for the training loops of other libraries: Hugging Face Trainer, Lightning and Accelerate. Each is a module
that imports its library; this package imports none of them.
"""

from __future__ import annotations


def missing(adapter: str, package: str, install: str) -> ImportError:
    """The error of an adapter whose package is not installed."""
    return ImportError(
        f"everstep.train.adapters.{adapter} needs the package {package!r}, which is not installed: pip install "
        f"{install}"
    )
