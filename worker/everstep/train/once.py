"""`run.once(fn)`: one process calls a function, and all processes get its result.

Once for a job: rank 0 calls it just before the first step. The result is part of the tracked state, so a process that
comes later, or a run that is resumed, does not call it again. Once for a machine: its first process calls it at once,
under a lock in the machine's file system, which the kernel releases if the process dies.

Invariant: a function that has returned on all members of a world is never called again in that run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from everstep.checkpoint.ranks import Ranks
from everstep.contract import env
from everstep.recovery.errors import LoopError

KEY = "once"  # in the tracked state


class Once:
    """The result of a function of `run.once`, perhaps a future one."""

    def __init__(self, results: Mapping[str, Any], key: str) -> None:
        self._results, self._key = results, key

    @property
    def value(self) -> Any:
        """The result, made of JSON values. Raises `LoopError` before it is known: for a job, before the first step."""
        if self._key not in self._results:
            raise LoopError(
                "run.once(fn).value before the first step: fn is called when the loop begins. Read it inside of "
                "`for step in run.steps(…):`"
            )
        return self._results[self._key]


class Results(dict[str, Any]):
    """The results, by the order of the functions. A commit without any result can still be resumed by a script that has
    got its first function since."""

    everstep_optional = True


class Onces:
    """The functions of one run. `results` is tracked."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._of_job: dict[str, Callable[[], Any]] = {}
        self._of_machine = 0
        self.results = Results()

    def __len__(self) -> int:
        return len(self._of_job)

    @property
    def done(self) -> bool:
        """Whether no function of the job is left to be called."""
        return self._of_job.keys() <= self.results.keys()

    def add(self, call: Callable[[], Any], each: str) -> Once:
        if each == "machine":
            self._of_machine += 1
            return Once({"": self._now(call)}, "")
        if each != "job":
            raise LoopError(f"run.once(fn, each={each!r}): write each='job' or each='machine'")
        key = str(len(self._of_job))
        self._of_job[key] = call
        return Once(self.results, key)

    def run(self, ranks: Ranks) -> None:
        """Call the functions that were not called yet. Collective."""
        for key, call in self._of_job.items():
            if key not in self.results:
                encoded = _encode(call()) if ranks.rank == 0 else b""
                self.results[key] = json.loads(ranks.from_first(encoded))

    def _now(self, call: Callable[[], Any]) -> Any:
        if "RANK" not in self._environ:
            return json.loads(_encode(call()))
        with (self._folder() / f"once-{self._of_machine}").open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # held until the file is closed, or this process is gone
            file.seek(0)
            if saved := file.read():
                return json.loads(saved)
            encoded = _encode(call())
            file.write(encoded)
            return json.loads(encoded)

    def _folder(self) -> Path:
        """The folder of this launch on this machine."""
        if path := self._environ.get(env.AGENT_SOCKET):
            return Path(path).parent
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        launch = hashlib.sha256("\0".join(self._environ.get(name, "") for name in names).encode()).hexdigest()[:16]
        folder = Path(tempfile.gettempdir()) / f"everstep-once-{os.getuid()}-{launch}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise LoopError(f"{folder} belongs to another user: run.once(each='machine') keeps its marks there")
        return folder


def _encode(result: Any) -> bytes:
    try:
        return json.dumps(result).encode()
    except (TypeError, ValueError) as e:
        raise LoopError(f"run.once(fn): fn returned what JSON cannot hold ({e}); return numbers, texts, lists") from e
