"""Finds out whether the program of this process was rehearsed: then no second computation has to prove it.

`everstep rehearse` leaves a stamp of a script in which it found nothing. A session looks for it once, when its loop
begins: beside the script, then below the checkpoint URL. It counts if the text of the script and of each module of the
user's, the arguments, the versions and the kind of device are those of the rehearsal (ADR 0053). Invariants: nothing
here raises, or waits longer than the store may take for an answer that a run does not need.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import platform
import sys
from collections.abc import Collection, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import torch

from everstep.contract.stamp import BESIDE_SCRIPT, MAIN, MOST_BYTES, Program, Stamp, object_name
from everstep.train.coordination.save_schedule import SaveSchedule
from everstep.train.guards.script_objects import is_script
from everstep.train.guards.sources import LARGEST, OURS
from everstep.version import __version__

log = logging.getLogger("everstep.train")

# Libraries by which a script trains, where it imports them.
LIBRARIES = ("torch", "numpy", "transformers", "accelerate", "lightning")


def look_up(schedule: SaveSchedule | None) -> Stamp | None:
    """The stamp of this program; None if there is none that counts, with a line in the log if one does not."""
    script = getattr(sys.modules.get(MAIN), "__file__", None)
    if script is None:
        return None
    why = ""
    try:
        for where, data in _candidates(script, schedule):
            try:
                stamp = Stamp.decode(data)
                differs = stamp.program.difference(program_of_process(stamp.program))
            except ValueError as e:
                differs = str(e)
            else:
                if differs is None:
                    log.info("this program was rehearsed (%s): the gradients of new processes are compared from their "
                             "step %d on, their plain values from the first one", stamp, stamp.steps)  # fmt: skip
                    return stamp
            why = why or f"the stamp {where} does not count, and new processes are compared: {differs}"
    except Exception:  # an unforeseen program trains as it would without a stamp
        log.warning("the stamp of a rehearsal could not be read; new processes are compared", exc_info=True)
    if why:
        log.info("%s", why)
    return None


def _candidates(script: str, schedule: SaveSchedule | None) -> Iterator[tuple[str, bytes]]:
    """What may be the stamp of the script, with its place."""
    name = object_name(script)
    beside = Path(script).parent / BESIDE_SCRIPT / name
    try:
        with beside.open("rb") as file:
            yield str(beside), file.read(MOST_BYTES + 1)
    except OSError:
        pass
    if schedule is not None and (data := schedule.beside(name, MOST_BYTES + 1)) is not None:
        yield f"{name} below the checkpoint URL", data


def program_of_process(stamped: Program | None = None) -> Program:
    """What this process runs. `stamped`: that of a stamp, whose modules count even where they are not loaded yet, and
    whose libraries alone do."""
    files = {
        name: file
        for name, module in list(sys.modules.items())
        # multiprocessing gives the script a second name where it is imported before a script has replaced the main one.
        if (file := getattr(module, "__file__", None)) and name.partition(".")[0] not in {*OURS, "__mp_main__"}
    }
    files = {name: file for name, file in files.items() if is_script(file, named=True)}
    for name in stamped.modules if stamped is not None else ():
        if name not in files and (file := _file_of(name)) is not None:
            files[name] = file
    libraries = [name for name in LIBRARIES if name in sys.modules]
    if stamped is not None:
        libraries = [name for name in LIBRARIES if name in stamped.versions]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return Program(
        {name: _digest(file) for name, file in files.items() if Path(file).is_file()},
        _digest_of_arguments(sys.argv[1:]),
        {"python": platform.python_version(), "everstep": __version__, **_versions(libraries)},
        accelerator.type if accelerator is not None else "cpu",
        files_of_arguments(sys.argv[1:]),
    )


def program() -> str | None:
    """A digest of the text of this program and of its arguments, without the files that they name. None if the script
    is no file (a prompt, a notebook), or cannot be read."""
    if getattr(sys.modules.get(MAIN), "__file__", None) is None:
        return None
    try:
        own = program_of_process()
    except OSError:
        return None
    return hashlib.sha256(repr((sorted(own.modules.items()), own.arguments)).encode()).hexdigest()


def _file_of(module: str) -> str | None:
    """The file from which a module would be loaded. Nothing is imported for that."""
    path: Collection[str] | None = None
    name = file = None
    for part in module.split("."):
        name = part if name is None else f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(path) if path is not None else None)
        if spec is None:
            return None
        path, file = spec.submodule_search_locations or (), spec.origin
    return file


def _versions(libraries: Collection[str]) -> dict[str, str]:
    versions = {}
    for name in libraries:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # it lies beside the script, or on the path without a package
            continue
    return versions


def _digest(file: str) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def files_of_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """The digest of each file that an argument names, as a whole or behind its `=`, by the argument's number."""
    files = {}
    for number, argument in enumerate(arguments, 1):
        digest = hashlib.sha256()
        for part in dict.fromkeys((argument, argument.rpartition("=")[2])):
            try:
                if Path(part).is_file() and Path(part).stat().st_size <= LARGEST:
                    digest.update(Path(part).read_bytes())
                    files[str(number)] = digest.hexdigest()
            except (OSError, ValueError):
                continue
    return files


def _digest_of_arguments(arguments: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for argument in arguments:
        digest.update(argument.encode(errors="surrogateescape") + b"\0")
    return digest.hexdigest()
