"""The commit of a run from which a rehearsal begins: a copy of it, in a folder of the rehearsal.

Invariant: what is named is read, and never written to.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from everstep.contract import redact
from everstep.rehearse.plan import PlanError

_AT_STEP = re.compile(r"(.+)@(\d{1,18})")


@dataclass(frozen=True, slots=True)
class Beginning:
    """`step`: of the commit. `folder`: a checkpoint folder that holds it alone."""

    step: int
    folder: Path

    def copy_to(self, place: Path) -> None:
        """Make a checkpoint folder of it. Its files are never changed in place, so they are linked."""
        shutil.copytree(self.folder, place, copy_function=os.link)


def fetch(text: str, folder: Path) -> Beginning:
    """Copy the commit that `text` names, "URL@STEP" or "URL" for its newest, into a new folder. Raises `PlanError`."""
    # Few rehearsals read a commit.
    from everstep.checkpoint.convert.copying import copy  # noqa: PLC0415
    from everstep.checkpoint.errors import CheckpointError  # noqa: PLC0415
    from everstep.checkpoint.log.commitlog import now  # noqa: PLC0415
    from everstep.checkpoint.retention.catalog import Catalog  # noqa: PLC0415
    from everstep.storage import StorageError, open_for_command, open_store  # noqa: PLC0415

    found = _AT_STEP.fullmatch(text)
    url, step = (found[1], int(found[2])) if found is not None else (text, None)
    try:
        source = open_for_command(url)
        catalog = Catalog(source)
        if not catalog.begun():
            raise PlanError(
                f"--from {redact.text(text)}: there is no checkpoint log there; look for a mistake in the URL"
            )
        record = catalog.find(step)
        copy(source, record, open_store(str(folder)), uuid.uuid4().hex, now())
    except (CheckpointError, StorageError, OSError) as e:
        raise PlanError(redact.text(f"--from {text}: {e}")) from e
    return Beginning(record.step, folder)
