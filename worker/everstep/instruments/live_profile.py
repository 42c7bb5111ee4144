"""A profile of the next steps of a training that goes on, for `everstep profile`.

The request comes in another thread. The profiler itself begins and ends in the training's thread, between two steps;
the trace is written and judged in a thread of its own. While nobody asks, a step costs one look at an attribute.
Invariant: an error here is answered to the person who asked, and never raised into training.
"""

from __future__ import annotations

import gzip
import json
import logging
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from everstep.instruments.trace import INPUT, STEP, summarize

log = logging.getLogger("everstep.train")

FOLDER = "profiles"  # below the job's URL
MAX_BYTES = 64 * 1024 * 1024  # of a packed trace: one object of any store

Answer = Callable[..., None]  # the request's id, then fields
Put = Callable[[str, bytes], str]  # an object's name and bytes; where it is


class LiveProfile:
    """One profile at a time. `put` writes an object below the job's URL; None without one."""

    def __init__(self, answer: Answer, put: Put | None) -> None:
        self._answer, self._put = answer, put
        self.asked: str | None = None  # the id of the request, until its last step is over
        self._profiler: profile | None = None
        self._step: Any = None
        self._left = self._first = 0
        self._busy = ""  # the id of the profile that is made or written

    @property
    def goes_on(self) -> bool:
        return self._profiler is not None

    def ask(self, id_: str, steps: int) -> None:
        """Profile the next steps. Called in another thread."""
        if self._busy:
            self._answer(id_, error=f"profile {self._busy} goes on in this process; ask again when it is complete")
        elif self._put is None:
            self._answer(id_, error="this run has no checkpoint URL, where the traces of a job are kept")
        else:
            self._busy, self._left = id_, steps
            self.asked = id_

    def step_begins(self, step: int, rank: int) -> None:
        """A step begins, and the one before is over. Called if `asked`."""
        try:
            if self._profiler is None:
                self._begin(step)
            else:
                self._step.__exit__(None, None, None)
                self._left -= 1
            if self._left > 0:
                self._step = record_function(STEP)
                self._step.__enter__()
            else:
                self._end(step, rank)
        except Exception as e:
            self._fail(e)

    @staticmethod
    def batch(fetch: Callable[[], Any]) -> Any:
        """Fetch a batch, while a profile goes on."""
        with record_function(INPUT):
            return fetch()

    def close(self, step: int, rank: int) -> None:
        """Training is over: what was profiled so far is the profile."""
        if self._profiler is not None:
            try:
                self._step.__exit__(None, None, None)
                self._end(step, rank).join()
            except Exception as e:
                self._fail(e)

    def _begin(self, step: int) -> None:
        kinds = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(ProfilerActivity.CUDA)
        profiler = profile(activities=kinds)
        profiler.start()
        self._first, self._profiler = step, profiler

    def _end(self, step: int, rank: int) -> threading.Thread:
        profiler, id_ = self._profiler, self._busy
        assert profiler is not None
        profiler.stop()
        self._profiler = self.asked = None  # no step of the next ones is looked at while the trace is written
        arguments = (profiler, id_, f"{FOLDER}/{id_}/rank-{rank}.json.gz", self._first, step)
        work = threading.Thread(target=self._keep, args=arguments, name="everstep-profile", daemon=True)
        work.start()
        return work

    def _keep(self, profiler: profile, id_: str, name: str, first: int, last: int) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="everstep-profile-") as folder:
                path = Path(folder) / "trace.json"
                profiler.export_chrome_trace(str(path))
                text = path.read_bytes()
            summary = summarize(json.loads(text)["traceEvents"])
            packed = gzip.compress(text, 5)
            if len(packed) > MAX_BYTES:
                raise ValueError(f"the trace has {len(packed) >> 20} MiB; ask for fewer steps")
            assert self._put is not None
            where = self._put(name, packed)
            said = {"first": first, "last": last, "trace": where, **asdict(summary)}
        except Exception as e:
            log.warning("profile %s: %s: %s", id_, type(e).__name__, e)
            said = {"error": f"{type(e).__name__}: {e}"[:500]}
        self._busy = ""
        self._answer(id_, **said)

    def _fail(self, error: Exception) -> None:
        """For example, the script has a profiler of its own."""
        id_, self._busy = self._busy, ""
        self._profiler = self.asked = None
        self._answer(id_, error=f"{type(error).__name__}: {error}"[:500])
