"""Local runs as `everstep.jobs` asks them: those that are alive over their sockets, and what others have left.

Invariant: a run that has ended is read from its folder alone, and refuses to be changed.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

from everstep.cli.printing import say_error
from everstep.jobs.history import Entry, EventSeen, History, HistoryError, decode, thinned
from everstep.jobs.source import RUNS, JobError, NoSuchJob, Run, RunEnded
from everstep.jobs.view import EventRow, View, moment
from everstep_local.run import control
from everstep_local.run.job_file import location_url
from everstep_operator.kube.wire import micro_time

STATUS, HISTORY, LOGS, JOB = "status.json", "history.jsonl", "logs", "trainingjob.json"
STARTED = "started.json"  # what `everstep run` was given, for a rerun
EVERSTEP = (sys.executable, "-m", "everstep.cli.main")
PROGRAM, PRINTED = "program", "printed.txt"  # of a run that `start` began
START_SECONDS, START_POLL_SECONDS = 120.0, 0.1
LAST_LINES = 20
STEPS_SHOWN = 3000  # step reports of a history that is sent or drawn
_started: list[subprocess.Popen[bytes]] = []  # children of this process


def alive() -> list[Run]:
    """The runs of this user that are alive, the oldest first."""
    try:
        return [LiveRun(address) for address in control.alive()]
    except control.ControlError as e:
        raise JobError(str(e)) from e


def ended(out: str | None, runs: str = RUNS) -> list[Run]:
    """The run that left this folder, or all that left one under `runs`, newest first. One of these whose status
    cannot be read is named, and left out. Raises `JobError`."""
    if out is not None:
        if not (Path(out) / STATUS).is_file():
            raise JobError(f"{out} has no {STATUS}: it is no folder of a run that has ended")
        return [EndedRun(Path(out), _load(Path(out)).job)]
    left, problems = kept_runs(runs)
    for problem in problems:
        say_error(f"note: {problem}")
    return list(left)


def kept_runs(runs: str) -> tuple[list[EndedRun], list[str]]:
    """What all runs left under `runs`, newest first, and of those whose status cannot be read why."""
    left: list[tuple[float, EndedRun]] = []
    problems: list[str] = []
    for file in Path(runs).glob(f"*/{STATUS}"):
        try:
            left.append((file.stat().st_mtime, EndedRun(file.parent, _load(file.parent).job)))
        except (JobError, OSError) as e:
            problems.append(str(e))
    return [run for _, run in sorted(left, key=lambda each: -each[0])], problems


def start(job: Mapping[str, Any], files: Mapping[str, str], runs: str) -> Run:
    """A new `everstep run` of this job, as soon as its operator has seen it. Its workers run in a folder with these
    files, by name. It outlives this process. Raises `JobError` with its last lines if it ends before."""
    name = str(job["metadata"]["name"])
    folder = _new_folder(Path(runs), name)
    program = folder / PROGRAM
    try:
        program.mkdir(parents=True)
        for file, text in files.items():
            (program / file).write_text(text, "utf-8")
        (program / JOB).write_text(json.dumps(job), "utf-8")
    except OSError as e:
        raise JobError(f"a run cannot be started in {folder}: {e}") from e
    return _begin(name, [str(program / JOB)], folder, Path.cwd())


def _new_folder(runs: Path, name: str) -> Path:
    if any(run.name == name for run in alive()):
        raise JobError(f"a local run {name} is alive: delete it, or give another name")
    return runs / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def _begin(name: str, arguments: Sequence[str], folder: Path, directory: Path) -> Run:
    """A process `everstep run` with these arguments in this directory, as soon as its operator has seen the job."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / PRINTED).open("wb") as printed:
            process = subprocess.Popen(
                [*EVERSTEP, "run", "--out", str(folder.resolve()), "--plain", *arguments],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for whoever waits for it
            )
    except OSError as e:
        raise JobError(f"a run cannot be started in {folder}: {e}") from e
    _started[:] = [each for each in _started if each.poll() is None]  # those that have ended are reaped
    _started.append(process)
    until = time.monotonic() + START_SECONDS
    while process.poll() is None:
        for run in alive():
            if isinstance(run, LiveRun) and run.address.pid == process.pid and _seen(run):
                return run
        if time.monotonic() > until:
            process.terminate()
            raise JobError(f"the run did not begin within {START_SECONDS:.0f} s; see {folder / PRINTED}")
        time.sleep(START_POLL_SECONDS)
    if (folder / STATUS).is_file():
        return EndedRun(folder, name)
    lines = (folder / PRINTED).read_text("utf-8", "replace").strip().splitlines()[-LAST_LINES:]
    raise JobError("\n".join(lines) or f"the run ended with {process.returncode}, and printed nothing")


def _seen(run: LiveRun) -> bool:
    """Whether the operator has taken up the job of the run; a job that is refused never is."""
    try:
        return bool(run.view(run.name).raw_status)
    except JobError:
        return False


def _load(folder: Path) -> View:
    """The view that a run wrote into its folder when it ended. Raises `JobError`."""
    try:
        view = View.from_json(json.loads((folder / STATUS).read_text("utf-8")))
        written = datetime.fromtimestamp((folder / STATUS).stat().st_mtime, UTC)
        return replace(view, as_of=view.as_of or written.isoformat())
    except (OSError, ValueError, KeyError, TypeError) as e:
        problem = f"{type(e).__name__}: {e}" if isinstance(e, KeyError | TypeError) else e
        raise JobError(f"{folder / STATUS} cannot be read: {problem}") from e


def _objects(folder: Path | None) -> dict[str, Any]:
    """The TrainingJob as it ran here; of an older run nothing."""
    try:
        return {"trainingjob": json.loads((folder / JOB).read_text("utf-8"))} if folder is not None else {}
    except (OSError, ValueError):
        return {}


@dataclass(slots=True)
class LiveRun:
    """A run that answers on its socket. `folder`: where it leaves its files, as soon as it has said so."""

    address: control.RunAddress
    folder: Path | None = None
    began: str = ""

    @property
    def name(self) -> str:
        return self.address.name

    @property
    def title(self) -> str:
        return f"local run {self.name}"

    def uid(self) -> str:
        return str(self._ask("status").get("uid") or "")

    def jobs(self) -> list[View]:
        return [self.summary(self.name)]

    def summary(self, job: str) -> View:
        if job != self.name:
            raise NoSuchJob(f"{self.title} is no {job!r}")
        return replace(self.view(job), workers=(), events=())

    def view(self, job: str) -> View:
        del job  # a run has one
        answer = self._ask("status")
        view = replace(View.from_json(answer["view"]), job=self.name)
        self.folder, self.began = Path(answer["out"]) if answer.get("out") else None, view.began
        return view

    def events(self, job: str) -> list[EventRow]:
        del job
        return [EventRow(**row) for row in self._ask("events")["events"]]

    def history(self) -> list[Entry]:
        """What was seen so far, with some of the step reports."""
        try:
            return [decode(line) for line in self._ask("history")["entries"]]
        except HistoryError as e:
            raise JobError(f"the history of {self.title} cannot be read: {e}") from e

    def objects(self, job: str) -> dict[str, Any]:
        if self.folder is None:
            self.view(job)
        return _objects(self.folder)

    def logs(
        self, job: str, pod: str, *, follow: bool, tail: int | None, silence: float | None = None
    ) -> Iterator[str]:
        del job
        try:
            for answer in control.ask(self.address, "logs", silence=silence, pod=pod, follow=follow, tail=tail):
                yield answer["line"]
        except control.ControlError as e:
            raise JobError(str(e)) from e

    def scale(self, job: str, replicas: int) -> None:
        self._ask("scale", replicas=replicas)

    def suspend(self, job: str, wanted: bool) -> None:
        self._ask("suspend", wanted=wanted)

    def rerun(self, job: str, url: str | None) -> tuple[Run, int]:
        del job, url
        raise JobError(
            f"{self.title} has not ended, and a rerun begins a finished job anew: to restart its workers, everstep "
            f"suspend {self.name}, then everstep resume {self.name}"
        )

    def delete(self, job: str) -> None:
        self._ask("delete-job")

    def kill(self, job: str, pod: str, *, delete: bool) -> str:
        return str(self._ask("delete" if delete else "kill", pod=pod)["done"])

    def migrate(self, job: str, pod: str) -> None:
        self._ask("migrate", pod=pod)

    def disturb(self, job: str, verb: str, **arguments: str) -> str:
        del job
        return str(self._ask(verb, **arguments)["done"])

    def _ask(self, verb: str, **arguments: Any) -> Any:
        try:
            answers = list(control.ask(self.address, verb, **arguments))
        except control.RunGoneError as e:
            raise self._ended() from e
        except control.ControlError as e:
            raise JobError(str(e)) from e
        if not answers:
            raise self._ended()
        return answers[0]

    def _ended(self) -> RunEnded:
        """What became of it, as far as it was heard of before."""
        if self.folder is None:
            return RunEnded(f"run {self.name} has just ended")
        try:
            view = _load(self.folder)
        except JobError:
            view = None
        if view is None or (self.began and view.began != self.began):  # that of another run, which had the same folder
            return RunEnded(f"run {self.name} has ended, and left no {STATUS} in {self.folder}: it was killed")
        return RunEnded(f"run {self.name} has ended; what it left is in {self.folder}", replace(view, job=self.name))


@dataclass(frozen=True, slots=True)
class Started:
    """What `everstep run` was given, without what is of one run: `--out`, `--checkpoint`, `--at`."""

    directory: Path
    job: str
    options: tuple[str, ...]
    words: tuple[str, ...]  # of the script

    @property
    def arguments(self) -> list[str]:
        return [*self.options, self.job, *(("--", *self.words) if self.words else ())]

    def write(self, folder: Path) -> None:
        body = {"directory": str(self.directory), "job": self.job, "options": self.options, "words": self.words}
        (folder / STARTED).write_text(json.dumps(body, indent=2) + "\n", "utf-8")


def _started_by(folder: Path) -> Started:
    try:
        body = json.loads((folder / STARTED).read_text("utf-8"))
        return Started(Path(body["directory"]), body["job"], tuple(body["options"]), tuple(body["words"]))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise JobError(
            f"{folder / STARTED} does not say how the run was started ({e}): use `everstep run` with --checkpoint, the "
            f"URL in {folder / JOB}"
        ) from e


@dataclass(frozen=True, slots=True)
class EndedRun:
    """What a run left in its folder."""

    folder: Path
    name: str

    @property
    def title(self) -> str:
        return f"ended, in {self.folder}"

    def uid(self) -> str:
        return ""

    def jobs(self) -> list[View]:
        return [self.summary(self.name)]

    def summary(self, job: str) -> View:
        if job != self.name:
            raise NoSuchJob(f"the run that left {self.folder} is no {job!r}")
        return replace(self.view(job), workers=(), events=())

    def view(self, job: str) -> View:
        del job
        return _load(self.folder)

    def events(self, job: str) -> list[EventRow]:
        return event_rows(self._history(), self.view(job).began)

    def history(self) -> list[Entry]:
        """What was seen, with some of the step reports."""
        return thinned(self._history(), STEPS_SHOWN)

    def _history(self) -> History:
        try:
            return History.load(self.folder / HISTORY)
        except (OSError, HistoryError) as e:
            raise JobError(f"what was seen of this run cannot be read: {e}") from e

    def objects(self, job: str) -> dict[str, Any]:
        del job
        return _objects(self.folder)

    def logs(
        self, job: str, pod: str, *, follow: bool, tail: int | None, silence: float | None = None
    ) -> Iterator[str]:
        del job, follow, silence  # nothing more is written
        yield from kept_log(self.folder, pod, tail)

    def scale(self, job: str, replicas: int) -> None:
        self._refuse()

    def suspend(self, job: str, wanted: bool) -> None:
        self._refuse()

    def rerun(self, job: str, url: str | None) -> tuple[Run, int]:
        """Another run, in a folder beside this one, over the same commits. Its job is a new one."""
        started = _started_by(self.folder)
        present = ((_objects(self.folder).get("trainingjob") or {}).get("spec") or {}).get("checkpoint") or {}
        if url is not None:
            url = location_url(url)  # a folder is meant from here, not from where the run was started
        if commits := url or present.get("url"):
            started = replace(started, options=(*started.options, "--checkpoint", commits))
        return _begin(job, started.arguments, _new_folder(self.folder.parent, job), started.directory), 0

    def delete(self, job: str) -> None:
        self._refuse()

    def kill(self, job: str, pod: str, *, delete: bool) -> str:
        self._refuse()

    def migrate(self, job: str, pod: str) -> None:
        self._refuse()

    def disturb(self, job: str, verb: str, **arguments: str) -> str:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise JobError(f"this run has ended; what it left is in {self.folder}")


def event_rows(entries: Iterable[Entry], began: str) -> list[EventRow]:
    """The events among the entries of a history that began then."""
    start = moment(began)

    def at(entry: EventSeen) -> str:
        seen = start + timedelta(seconds=entry.at) if start is not None else None
        return entry.time or (micro_time(seen) if seen is not None else "")

    return [EventRow(at(e), e.type, e.reason, e.message) for e in entries if isinstance(e, EventSeen)]


def kept_log(folder: Path, pod: str, tail: int | None) -> Iterator[str]:
    """The lines of a pod's log that a run keeps in its folder, without their times. Raises `JobError`."""
    path = folder / LOGS / f"{pod}.log"
    try:
        # A carriage return of a progress bar ends no line here: what follows it has no time before it.
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for line in file if tail is None else deque(file, tail):
                yield line.rstrip("\n").partition(" ")[2]
    except OSError as e:
        kept = sorted(each.stem for each in (folder / LOGS).glob("*.log"))
        raise JobError(f"no log of {pod!r}; there are {', '.join(kept) or 'none'}") from e
