"""Runs a script, and notes in FOLDER which samples each step of this process had: `streaming_ids.py FOLDER SCRIPT …`.

One file a process, one line a step: epoch, step of the epoch, indices. A step that is taken again has its last line.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from everstep.data import Batch

to = Batch.to
file = Path(sys.argv[1]) / f"{os.getpid()}.txt"


def noting(batch: Batch[Any], *args: Any, **kwargs: Any) -> Any:
    with file.open("a") as lines:
        lines.write(f"{batch.epoch} {batch.step} {' '.join(str(i) for i in list(batch.indices)[: batch.count])}\n")
    return to(batch, *args, **kwargs)


Batch.to = noting  # type: ignore[method-assign]
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
