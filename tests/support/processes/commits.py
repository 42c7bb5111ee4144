"""What a job has committed."""

from __future__ import annotations

import json
from pathlib import Path

from everstep.checkpoint import Catalog
from everstep.storage import open_store


def newest_commit(folder: Path) -> int:
    """The step of the newest commit, 0 without one. (Their number says nothing: old ones are deleted.)"""
    found = Catalog(open_store(str(folder))).latest()
    return found.step if found is not None else 0


def commits(folder: Path) -> list[int]:
    """The steps of all commits, in their order."""
    written = sorted((folder / "commits" / "log").glob("[0-9]*"))  # and not what is being written
    records = [json.loads(path.read_text().splitlines()[0]) for path in written]
    return [r["step"] for r in records if r["kind"] == "commit"]
