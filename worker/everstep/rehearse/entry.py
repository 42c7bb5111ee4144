"""The program of each rank of a rehearsal: `entry.py SCRIPT ARGUMENTS`. It runs the script as `python SCRIPT` would."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

from everstep.checkpoint.log import opening
from everstep.contract.main_script import run_script
from everstep.installing import remedy
from everstep.rehearse import stamp
from everstep.rehearse.file_state import FileState
from everstep.rehearse.library_loop import LibraryLoop
from everstep.rehearse.own_loop import OwnLoop
from everstep.rehearse.plan import SETTINGS, Kill, LiveChange
from everstep.rehearse.printed import Output, log_apart
from everstep.rehearse.process_end import end
from everstep.rehearse.record import GONE, KILLS, note_unconverted
from everstep.rehearse.saves import Saves
from everstep.rehearse.store_loss import StoreLoss
from everstep.rehearse.watch import Watch, replace_all
from everstep.rehearse.worker_state import WorkerState
from everstep.storage import open_store
from everstep.train.guards.comparison.rehearsed import files_of_arguments, program_of_process
from everstep.train.guards.sources import loaded_files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if SETTINGS not in os.environ:
        parser.error("this is started by `everstep rehearse SCRIPT`, which says what to kill and where to write")
    settings = json.loads(os.environ[SETTINGS])
    kills = [Kill.parse(text) for text in settings["kills"]]
    folder = Path(settings["folder"])
    if not settings["last"] and any(folder.glob(KILLS)):
        (folder / GONE).touch()
        signal.pause()  # the agent started it again, and is about to be ended: another size goes on
    saves = Saves(folder, settings["wait"])
    saves.install()
    change = LiveChange(**settings["change"]) if settings["change"] is not None else None
    watch = Watch(
        folder, kills, settings["steps"], settings["every"], settings["begins"], saves, change, settings["heap"]
    )
    if settings["same_commits"]:
        watch.on_enter.append(lambda *_: saves.wait())  # a save that is due while another is in flight comes later
    watch.install()
    if settings["away"] is not None:
        loss = StoreLoss(folder, settings["away"], saves)
        watch.on_enter.append(loss.enters)
        replace_all((opening, "open_store", loss.wrap(open_store)))
    own = OwnLoop(watch, folder)
    own.install()
    LibraryLoop(watch, own).install()
    _offer_horovod()
    log_apart()
    Output(watch, folder).install()
    WorkerState(folder).install()
    FileState(watch, folder).install()
    begun = files_of_arguments(given.arguments)
    try:
        _run(given.script, given.arguments, watch)
    finally:
        with contextlib.suppress(OSError):  # a file that is gone: then there is no stamp
            stamp.note(folder, program_of_process(), begun)
            note_unconverted(folder, {given.script, *loaded_files()})
    end()


def _run(script: str, arguments: list[str], watch: Watch) -> None:
    """Raises what the script ends with, if that is an error."""
    try:
        run_script(script, arguments)
    except SystemExit as e:
        if e.code not in (None, 0):
            raise
    except StopIteration:  # `while run.step < 1000: with next(steps)`: it asks for more steps than are rehearsed
        if watch.run is None or not watch.is_cut or not watch.ends(watch.run):
            raise
    except ModuleNotFoundError as e:
        if e.name == "horovod":
            raise SystemExit(f"everstep rehearse: the script imports horovod: {remedy('everstep-horovod')}") from e
        raise


def _offer_horovod() -> None:
    """A script that imports Horovod gets our distribution of its interface, as by `-m everstep_horovod`."""
    found = importlib.util.find_spec("everstep_horovod")
    if found is not None and found.origin is not None:
        sys.path.insert(1, str(Path(found.origin).with_name("importable")))


if __name__ == "__main__":
    main()
