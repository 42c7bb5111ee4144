"""Leaves the stamp of a rehearsal that found nothing: of what its processes ran, with how many ranks and steps.

Each process of a rehearsal notes what it runs when it ends, because only then all of its modules are loaded.
Without torch: the command line imports it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.contract import redact
from everstep.contract.stamp import BESIDE_SCRIPT, Program, Stamp, object_name, unchanged
from everstep.rehearse.plan import PlanError
from everstep.rehearse.record import write_whole

if TYPE_CHECKING:
    from everstep.storage import ObjectStore

NOTES = "program-*.json"
PROVEN = frozenset({"rank", "all"})  # a stamp leaves out what would be compared after either


def note(folder: Path, program: Program, begun: Mapping[str, str]) -> None:
    """What this process has run. `begun`: the files that its arguments named when it began."""
    program = replace(program, files=unchanged([begun, program.files]))
    write_whole(folder / f"program-{os.getpid()}.json", json.dumps(asdict(program)))


def program_of(folder: Path) -> Program | None:
    """What the processes of all runs below the folder have run; None if none of them has noted that, or if it was not
    the same: a file of the script was changed meanwhile."""
    notes = [Program(**json.loads(path.read_text())) for path in folder.glob(f"*/{NOTES}")]
    if not notes:
        return None
    first = notes[0]
    modules = {name: digest for one in notes for name, digest in one.modules.items()}
    versions = {name: version for one in notes for name, version in one.versions.items()}
    whole = Program(modules, first.arguments, versions, first.device, unchanged([one.files for one in notes]))
    same = all(
        {**modules, **one.modules} == modules and {**versions, **one.versions} == versions
        and (one.arguments, one.device) == (first.arguments, first.device)
        for one in notes
    )  # fmt: skip
    return whole if same else None


def check(place: str | None, kinds: Iterable[str]) -> None:
    """Raises `PlanError` if a stamp is asked for that the rehearsal cannot leave."""
    if place is None:
        return
    if not set(kinds) >= PROVEN:
        raise PlanError("--stamp: a stamp is left where --kill has rank and all, and --at is auto")
    _store(place)


def write(place: str | None, script: Path, stamp: Stamp) -> str:
    """Where the stamp lies now: below `place`, a folder or URL, or beside the script. Raises `PlanError`."""
    name = object_name(script.name)
    if place is None:
        target = _beside(script)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(stamp.encode())
        except OSError as e:
            raise PlanError(f"no stamp in {target.parent}: {e.strerror}; --stamp names another place") from e
        return str(target)
    store = _store(place)
    with _translated(place):
        store.put(name, stamp.encode())
    return f"{store.url.rstrip('/')}/{name}"


def withdraw(place: str | None, script: Path) -> None:
    """Delete the stamp of an earlier rehearsal, because this one has found something. Raises `PlanError`."""
    if place is not None:
        with _translated(place):
            _store(place).delete(object_name(script.name))
        return
    try:
        _beside(script).unlink(missing_ok=True)
    except OSError as e:
        raise PlanError(f"{_beside(script)}, the stamp of an earlier rehearsal, stays: {e.strerror}. Delete it") from e


def _beside(script: Path) -> Path:
    return script.absolute().parent / BESIDE_SCRIPT / object_name(script.name)


def _store(place: str) -> ObjectStore:
    from everstep.storage import open_for_command  # noqa: PLC0415  few rehearsals need a store

    with _translated(place):
        return open_for_command(place)


@contextmanager
def _translated(place: str) -> Iterator[None]:
    from everstep.storage import StorageError  # noqa: PLC0415  as above

    try:
        yield
    except StorageError as e:
        raise PlanError(redact.text(f"--stamp {place}: {e}")) from e
