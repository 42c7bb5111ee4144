"""Undisturbed runs of recipes that several tests need: each is made once, whichever test asks first.

The tests of one recipe may be in different processes of pytest-xdist. So a run is kept in a folder that these processes
share, and a lock lets one of them make it while others wait. Invariant: tests read a shared run and change nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.recipes.recipes import Ended, loaded, undisturbed

OUTPUT = "output.txt"  # is written when the run has ended well


class SharedRuns:
    """`folder` is the same in all processes of a run of pytest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(
        self, name: str, arguments: Sequence[str], processes: int = 3, through: Sequence[Path] = (), **variables: str
    ) -> Ended:
        """As `undisturbed`. A run that failed is made again for the next test that asks."""
        asked = json.dumps([arguments, processes, [str(one) for one in through], variables], sort_keys=True)
        folder = self._folder / f"{name}-{hashlib.sha256(asked.encode()).hexdigest()[:12]}"
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, also by the end of this process
            if not (folder / OUTPUT).exists():
                shutil.rmtree(folder, ignore_errors=True)
                ended = undisturbed(name, folder, arguments, processes, through, **variables)
                (folder / OUTPUT).write_text(ended.output)
        return loaded(folder, (folder / OUTPUT).read_text())


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """xdist gives each of its processes a folder in that of the whole run."""
    base = factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "recipes"
