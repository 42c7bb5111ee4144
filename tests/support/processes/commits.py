"""What a job has committed."""

from __future__ import annotations

from pathlib import Path

from everstep.checkpoint import Catalog
from everstep.storage import open_store


def newest_commit(folder: Path) -> int:
    """The step of the newest commit, 0 without one. (Their number says nothing: old ones are deleted.)"""
    found = Catalog(open_store(str(folder))).latest()
    return found.step if found is not None else 0
