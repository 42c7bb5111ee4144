"""A profile of the next steps of a training that goes on, for `everstep profile`.

The request comes in another thread. The profiler itself begins and ends in the training's thread, between two steps;
the trace is written and judged in a thread of its own. While nobody asks, a step costs one look at an attribute.
Invariants: an error here is answered to the person who asked, and never raised into training; each request is answered
once, unless the process ends before.
"""

from __future__ import annotations

import atexit
import contextlib
import gzip
import json
import logging
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from everstep.torch_private.autograd import is_profiled

# --- trace
# What a Chrome trace of some steps says about communication, overlap and waiting for data. Times are unions of
# intervals, so that what runs at the same time in two threads or streams counts once. On an accelerator, computation
# and communication are its kernels. On a CPU, computation is what torch's operators take, and communication is from the
# beginning of a collective to its end in the library (gloo, MPI, UCC). Waiting for data is what our own loaders and
# torch's DataLoader take in the thread that trains.

# The names of our own annotations. MOVED: the world has changed in this step, which may have failed and be repeated.
STEP, INPUT, MOVED = "everstep.step", "everstep.input", "everstep.moved"
_LOADER = "enumerate(DataLoader)#"  # with this torch's DataLoader begins the name of a wait for its next batch
_COPIES = "gpu_user_annotation"  # the category of an annotation's copy on the accelerator's time line
_LIBRARIES = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:")
_KERNELS = ("nccl", "rccl")  # in the names of an accelerator's kernels that communicate

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Summary:
    """Of all steps together, except those in which the world has changed. The shares are of the steps' time, from 0 to
    1.

    `communication`: in which a collective was under way. `overlap`: the part of that time in which this rank also
    computed; None without communication. `exposed`: in which it communicated and did not compute. `input`: in which the
    step waited for a batch; None if no batch came from a loader that is known. `left_out`: the number of steps in which
    the world has changed.
    """

    steps: int
    left_out: int
    step_seconds: float
    communication: float
    overlap: float | None
    exposed: float
    input: float | None


class NoSteps(ValueError):
    """The trace has no step that can be measured."""


def summarize(events: Iterable[Mapping[str, Any]]) -> Summary:
    """`events`: the trace's `traceEvents`. Raises `NoSteps`."""
    kept = [e for e in events if e.get("ph") == "X" and "dur" in e and e.get("cat") != _COPIES]
    moved = [float(e["ts"]) for e in kept if e["name"] == MOVED]
    steps = [e for e in kept if e["name"] == STEP]
    whole = [e for e in steps if not any(float(e["ts"]) <= at <= float(e["ts"]) + float(e["dur"]) for at in moved)]
    windows = _spans(whole)
    total = _length(windows)
    if steps and not total:
        raise NoSteps("the world has changed in each of its steps, so they say nothing about the others: ask again")
    if not total:
        raise NoSteps("the trace has no step: it ended before the first one was complete")
    trains = {e.get("tid") for e in steps}
    waits = [e for e in kept if e.get("tid") in trains and e["name"].startswith((INPUT, _LOADER))]
    kernels = [e for e in kept if e.get("cat") == "kernel"]
    if kernels:
        talks = [e for e in kernels if any(word in e["name"].lower() for word in _KERNELS)]
        works = [e for e in kernels if not any(word in e["name"].lower() for word in _KERNELS)]
    else:
        talks = [e for e in kept if e["name"].startswith(_LIBRARIES)]
        works = [e for e in kept if e.get("cat") == "cpu_op" and not e["name"].startswith("c10d::")]
    communication = common(_spans(talks), windows)
    hidden = _length(common(communication, _spans(works)))
    took = _length(communication)
    return Summary(
        steps=len(whole),
        left_out=len(steps) - len(whole),
        step_seconds=total / 1e6 / len(whole),
        communication=took / total,
        overlap=hidden / took if took else None,
        exposed=(took - hidden) / total,
        input=_length(common(_spans(waits), windows)) / total if waits else None,
    )


def _spans(events: Iterable[Mapping[str, Any]]) -> list[Interval]:
    return union((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def common(some: list[Interval], others: list[Interval]) -> list[Interval]:
    """The time that is in both; each is disjoint and in order."""
    shared: list[Interval] = []
    i = j = 0
    while i < len(some) and j < len(others):
        begin, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if begin < end:
            shared.append((begin, end))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return shared


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


# --- live profile

log = logging.getLogger("everstep.train")

FOLDER = "profiles"  # below the job's URL
MAX_BYTES = 64 * 1024 * 1024  # of a packed trace: one object of any store
CLOSE_SECONDS = 60.0  # for which the end of the training waits for the trace

Answer = Callable[..., None]  # fields
Put = Callable[[str, bytes], str]  # an object's name and bytes; where it is


class LiveProfile:
    """One profile at a time. `put` writes an object below the job's URL; None without one."""

    def __init__(self, put: Put | None) -> None:
        self._put = put
        self._asking = threading.Lock()
        self.request_id: str | None = None  # the id of the request, until its last step is over
        self._answer: Answer = _nobody
        self._profiler: profile | None = None
        self._step: Any = None
        self._wanted = self._left = self._first = self._at = 0  # at: the number of the present step
        self._who = ""  # in the trace's name
        self._rank: int | None = None
        self._busy = ""  # the id of the profile that is made or written
        self._over = False

    @property
    def goes_on(self) -> bool:
        return self._profiler is not None

    def ask(self, id_: str, steps: int, answer: Answer) -> None:
        """Profile the next steps. Called in another thread."""
        with self._asking:
            if error := self._refusal():
                answer(error=error)
                return
            self._busy, self._wanted, self._left, self._answer = id_, steps, steps, answer
            self.request_id = id_

    def _refusal(self) -> str:
        if self._busy:
            of = f", with {self._left} of its {self._wanted} steps to come" if self.request_id is not None else ""
            return f"profile {self._busy} goes on in this process{of}; ask again when it is complete"
        if self._over:
            return "the training in this process is over, so no further step comes"
        if self._put is None:
            return "this run has no checkpoint URL, where the traces of a job are kept"
        return ""

    def step_begins(self, step: int, rank: int | None, who: str = "") -> None:
        """A step begins, and the one before is over. Called if `asked`. `who`: in the trace's name, for a process that
        has no rank."""
        try:
            if self._profiler is None:
                self._begin(step, rank, who)
            else:
                self._step.__exit__(None, None, None)
                self._left -= 1
            self._at = step
            if self._left > 0:
                self._step = record_function(STEP)
                self._step.__enter__()
            else:
                self._end(step)
        except Exception as e:
            self._fail(e)

    def moved(self) -> None:
        """The world has changed in the present step, whose time says nothing about others."""
        if self._profiler is not None:
            with record_function(MOVED):
                pass

    @staticmethod
    def batch(fetch: Callable[[], Any]) -> Any:
        """Fetch a batch, while a profile goes on."""
        with record_function(INPUT):
            return fetch()

    def close(self) -> None:
        """Training is over: what was profiled so far is the profile. A second call does nothing."""
        with self._asking:
            self._over = True
        if self.request_id is None:
            return
        try:
            if self._profiler is None:
                raise RuntimeError("the training was over before its next step began")
            self._step.__exit__(None, None, None)
            self._end(self._at + 1).join(CLOSE_SECONDS)
        except Exception as e:
            self._fail(e)

    def _give_up(self) -> None:
        """The process ends. An interpreter that ends under a profiler crashes, and its exit code would be lost."""
        if (profiler := self._profiler) is not None:
            with contextlib.suppress(Exception):
                self._step.__exit__(None, None, None)
                profiler.stop()
            self._fail(RuntimeError("the process ended before its profile was complete"))

    def _begin(self, step: int, rank: int | None, who: str) -> None:
        if is_profiled():  # torch would end that one, and say nothing
            raise RuntimeError("the script has a profiler of its own, which goes on now; ask again when it is over")
        kinds = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(ProfilerActivity.CUDA)
        profiler = profile(activities=kinds)
        atexit.register(self._give_up)
        profiler.start()
        self._first, self._profiler = step, profiler
        # Those of the beginning: later another process may have this rank, if the world changes.
        self._rank, self._who = rank, who or f"rank-{rank}"

    def _end(self, step: int) -> threading.Thread:
        profiler, id_ = self._profiler, self._busy
        assert profiler is not None
        profiler.stop()
        atexit.unregister(self._give_up)
        self._profiler = self.request_id = None  # no step of the next ones is looked at while the trace is written
        arguments = (profiler, f"{FOLDER}/{id_}/{self._who}.json.gz", self._first, step)
        work = threading.Thread(target=self._keep, args=arguments, name="everstep-profile", daemon=True)
        work.start()
        return work

    def _keep(self, profiler: profile, name: str, first: int, last: int) -> None:
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
            outcome = {"first": first, "last": last, "trace": where, **asdict(summary)}
            if self._rank is not None:
                outcome["rank"] = self._rank
        except Exception as e:
            log.warning("profile %s: %s: %s", self._busy, type(e).__name__, e)
            outcome = {"error": f"{type(e).__name__}: {e}"[:500]}
        answer, self._busy = self._answer, ""
        answer(**outcome)

    def _fail(self, error: Exception) -> None:
        self._profiler = self.request_id = None
        answer, self._busy = self._answer, ""
        answer(error=f"{type(error).__name__}: {error}"[:500])


def _nobody(**_: Any) -> None: ...
