"""Plays one scenario: `everstep-run` on this machine, with a copy of the script's folder for what it writes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from everstep.agent.arguments import MODULES, PRELOAD
from everstep.agent.preload import preloaded
from everstep.contract import env
from everstep.rehearse import begun_anew, record, timeline, written
from everstep.rehearse.agents import Agents, RunAgent, Stopped
from everstep.rehearse.beginning import Beginning
from everstep.rehearse.plan import AGAIN, CALM, SETTINGS, Scenario
from everstep.rehearse.repeated_errors import RepeatedErrors
from everstep.rehearse.rounds_loss import RoundsLoss
from everstep.rehearse.starvation import is_starved
from everstep.rehearse.timeline import Timeline
from everstep.rehearse.written import Printed, Written

ENTRY = Path(__file__).with_name("entry.py")
RESTARTS = 8  # of the agent where something is killed: more than the losses of any scenario
COPIED_BYTES, COPIED_FILES = 64 * 2**20, 2000  # of the script's folder
LEFT_OUT = {"__pycache__", "node_modules", "venv"}
MOST_CODE = 100  # characters of a line of the script
HASH_SEED = "PYTHONHASHSEED"  # decides the order of a set of texts
FIRST_SEED, OTHER_SEED = 1, 2
END_SECONDS = 10.0
MAKES_STEPS = 0.25  # of the limit: since then a run that is slow and does not stand still has completed a step
WAIT = 0.2  # of the limit: so long a process waits for a save at most
LOOK_SECONDS, SHORT_LOOK_SECONDS = 0.25, 0.05  # between two looks at a run


@dataclass
class Played:
    """How a scenario ended. `refused`: the sentence by which Everstep refused the script, or "". A later
    start may have come to the end all the same."""

    scenario: Scenario
    steps: record.Steps
    code: int
    seconds: float
    killed: int  # processes
    log: str
    hung: bool = False  # it did not come to its end in time
    slow: bool = False  # it hung, and was making steps, or had not got the processor time that it wanted
    first: Played | None = None  # how the same run ended before it was repeated
    refused: str = ""
    saved: bool = True  # no start behind a loss began from nothing
    in_library: bool = False  # the steps are Trainer's or Lightning's
    own_loop: bool = False  # the script's, which saves by a Checkpointer
    by_commits: bool = False  # its loop is a function of hvd.elastic.run
    files: dict[str, Written] = field(default_factory=dict)  # that the script wrote, by their names below its folder
    printed: Printed = field(default_factory=dict)  # by rank 0, in the loop
    timeline: Timeline = field(default_factory=Timeline)
    begins: int | None = None  # the step of the commit from which it began
    repeated: str = ""  # the error that has ended two starts of a rank, one after the other
    at: str = ""  # the script's line in the last traceback or refusal of the log
    carried: str = ""  # the names that the loop carries and nothing tracks, as the warning of its start lists them
    loaded: str = ""  # the optimizers and schedules that its warning says had taken steps before the run
    missed: bool = False  # a request has met a store that was away
    late: bool = False  # a process has waited in vain, for a save or for the rehearsal itself
    not_made: tuple[str, ...] = ()  # the kills of the plan that were not made
    unconverted: bool = False  # the script never calls Everstep
    evaluated: dict[int, int] = field(default_factory=dict)  # see `record.evaluated`
    in_workers: tuple[str, ...] = ()  # what changes in the workers of its loaders
    in_files: tuple[str, ...] = ()  # files elsewhere that a step reads and an earlier one has written
    commits: tuple[int, ...] = ()  # of how many steps, in a loop whose processes can go on in another size
    heaps: dict[int, begun_anew.Heaps] = field(default_factory=dict)  # by rank
    live: record.Steps = field(default_factory=dict)  # behind the change of size in which processes went on
    alike: Played | None = None  # the same again, with the hash seed of the first calm run

    @property
    def proves_nothing(self) -> bool:
        """It did not end in time, and the script is not the reason."""
        return self.hung and (self.slow or self.scenario.name == AGAIN)

    @property
    def otherwise(self) -> str:
        """Why it lost something else than the plan says, or ""."""
        if self.scenario.name in (CALM, AGAIN) or self.code or self.hung:
            return ""
        if self.late:
            what = "the stores were away" if self.scenario.away else "a rank was killed"
            return f"{what} when something that this had to wait for was not yet done, such as a save that had begun"
        return f"nobody was killed at {', '.join(self.not_made)}" if self.killed and self.not_made else ""

    @property
    def heap_read(self) -> tuple[int, ...]:
        """Behind how many steps the heap was read last, and behind the one before."""
        steps = self.heaps.get(0, {}).keys()
        return tuple(sorted(step for step in steps if step - 1 in steps)[-1:])

    @property
    def last(self) -> int:
        """The last step that was completed."""
        return max((step for _, step in self.steps), default=0)


class Player:
    """Plays `command`, a script with its arguments, in folders below `folder`; from a commit, if there is a
    `beginning`."""

    def __init__(
        self, folder: Path, command: list[str], every: int, limit: float, beginning: Beginning | None = None
    ) -> None:
        self._beginning = beginning
        self._folder, self._command, self._every, self._limit = folder, command, every, limit
        self._stopped = threading.Event()
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("EVERSTEP_")}
        self._environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        # The agent looks for slow imports in the program that it starts, and that is `entry.py`.
        named = os.environ.get(PRELOAD)
        self._modules = tuple(
            filter(None, named.split(",")) if named is not None else (*MODULES.split(","), *preloaded(command[0]))
        )
        self._agents = self._agents_of(FIRST_SEED)
        self._others: Agents | None = None  # which begin with another hash seed

    def close(self) -> None:
        """End what runs."""
        self._agents.close()
        if self._others is not None:
            self._others.close()

    def stop(self) -> None:
        """End the runs in progress, whichever threads play them, and begin no other one."""
        self._stopped.set()
        for agents in (self._agents, self._others):
            if agents is not None:
                agents.stop()

    def play(self, scenario: Scenario, progress: Callable[[int], None]) -> Played:
        """Raises `OSError`, and `Stopped` behind `stop`. `progress` is told how many steps are complete, about four
        times a second. A run that was too slow is repeated once; so are one that lost something else than it
        should, and a second calm run that fails. The second calm run has a hash seed of its own, so that the order of
        sets is another, as in each process that begins anew; unless PYTHONHASHSEED is set."""
        if scenario.name == AGAIN and self._others is None and HASH_SEED not in os.environ:
            self._others = self._agents_of(OTHER_SEED)
        run = self._play(scenario, scenario.name, progress)
        fails = scenario.name == AGAIN and run.code != 0 and not run.refused
        if scenario.name != CALM and (run.slow or run.otherwise or fails):
            run = replace(self._play(scenario, f"{scenario.name}-repeated", progress), first=run)
        return run

    def play_alike(self, scenario: Scenario, progress: Callable[[int], None]) -> Played | None:
        """The second calm run with the hash seed of the first; None where it had that."""
        if self._others is None:
            return None
        self._others.close()
        self._others = None
        return self._play(scenario, f"{scenario.name}-alike", progress)

    def _agents_of(self, seed: int) -> Agents:
        environ = {HASH_SEED: str(seed), **self._environ}
        return Agents(self._modules, environ, self._folder / "imports.log")

    def _play(self, scenario: Scenario, name: str, progress: Callable[[int], None]) -> Played:
        place = self._folder / name
        place.mkdir(parents=True)
        begins = None
        if self._beginning is not None:
            begins = self._beginning.step
            self._beginning.copy_to(place / "commits")
        where = _copied(Path.cwd(), place / "folder", self._folder)
        before = _stamps(where) if where is not None else {}
        began, began_at, code, hung, slow = time.monotonic(), time.time(), 0, False, False
        (place / "log").touch()
        errors, repeated = RepeatedErrors(place / "log"), ""
        for i, ranks in enumerate(scenario.sizes):
            last = i == len(scenario.sizes) - 1
            change = scenario.change if i == 0 else None
            settings = {
                "folder": str(place), "kills": [kill.name for kill in scenario.kills], "steps": scenario.steps,
                "every": self._every, "last": last, "begins": begins,
                "away": scenario.away, "wait": self._limit * WAIT,
                "change": asdict(change) if change is not None else None,
                "heap": scenario.heap,
                "same_commits": scenario.name == CALM or scenario.change is not None,
            }  # fmt: skip
            restarts = RESTARTS if scenario.kills else 0
            agents = self._others if scenario.name == AGAIN and self._others is not None else self._agents
            ended, hung, slow = self._run(agents, ranks, restarts, settings, where, place, errors, progress)
            code, repeated = code or ended, repeated or errors.pop()
            # What a start with this size does is compared with the other run, also where processes did not go on.
            if hung or not (last or _killed(place) or change is not None):
                break
        log = (place / "log").read_text(errors="replace")
        seconds = time.monotonic() - began
        changed = {n for n, s in _stamps(where).items() if before.get(n) != s} if where is not None else set()
        size = scenario.change.size if scenario.change is not None else None
        live = record.read(place, size=size) if size is not None else {}
        own_loop = any(place.glob(record.MARKS)) or (place / record.OWN).exists()
        in_library = (place / record.LIBRARY).exists()
        commits = [step - (begins or 0) for _, step in timeline.commits(place, began_at)]
        return Played(
            scenario, record.read(place, but=size), code, seconds, _killed(place), log,
            hung, slow, None, refusal_in(log), not record.began_again(place),
            in_library, own_loop, (place / record.COMMITS).exists(),
            written.read_files(where, changed, place) if where is not None else {}, written.read_printed(place),
            timeline.read(place, began_at), begins, repeated,
            line_in(log, where if where is not None else Path.cwd()), carried_in(log), loaded_in(log),
            any(place.glob(f"{record.AWAY}*")), (place / record.LATE).exists(),
            tuple(kill.name for kill in scenario.kills if not any(place.glob(f"killed-{kill.name}-*"))),
            (place / record.UNCONVERTED).exists(), record.evaluated(place), record.noted(place, record.IN_WORKERS),
            record.noted(place, record.IN_FILES), tuple(commits) if not (own_loop or in_library) else (),
            begun_anew.read(place), live,
        )  # fmt: skip

    def _run(
        self, agents: Agents, ranks: int, restarts: int, settings: dict[str, Any], where: Path | None,
        place: Path, errors: RepeatedErrors, progress: Callable[[int], None],
    ) -> tuple[int, bool, bool]:  # fmt: skip
        """The exit code; whether it did not end in time; and whether that was because it was slow."""
        environ = self._environ | {
            name: os.environ[name] for name in (env.HOROVOD_ELASTIC,) if name in os.environ
        }  # fmt: skip
        environ |= {
            SETTINGS: json.dumps(settings),
            env.CHECKPOINT_URL: str(place / "commits"),  # for scripts that leave it to the environment
            env.CHECKPOINT_EVERY_STEPS: str(self._every),
            PRELOAD: ",".join(self._modules),
        }
        if settings["change"] is not None:
            environ[env.HANG_SECONDS] = str(self._limit)  # in one step the ranks wait for another that begins
        flags = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
        script, *arguments = self._command
        if where is not None and Path(script).is_relative_to(Path.cwd()):
            script = str(where / Path(script).relative_to(Path.cwd()))  # what it writes beside itself stays there
        # Where all are killed and others begin, the agent would start new ones meanwhile.
        pause = LOOK_SECONDS if settings["away"] is None and settings["last"] else SHORT_LOOK_SECONDS
        if self._stopped.is_set():
            raise Stopped
        command = [*flags, str(ENTRY), script, *arguments]
        agent = agents.start(command, environ, place / "log", where or Path.cwd())
        # The imports of the fork server are over. Until its first step a script may import and build for as long again.
        counted_from = last_at = time.monotonic()
        change = settings["change"]
        living = change["size"] if change is not None else ranks
        rounds = RoundsLoss(place, agent.pid)
        progressed, last = record.Progress(place), 0  # the newest step; `last_at`: when it was seen first
        try:
            while True:
                try:
                    return agent.wait(pause) or int(errors.look() != ""), False, False
                except subprocess.TimeoutExpired:
                    rounds.look()
                    done = progressed.look()
                    if done > last:
                        counted_from = counted_from if last else time.monotonic()
                        last, last_at = done, time.monotonic()
                    progress(done)
                if self._stopped.is_set():
                    raise Stopped
                if not settings["last"] and ((place / record.GONE).exists() or _dead(place) >= living):
                    agent.send_signal(signal.SIGKILL, group=True)
                    return 0, False, False
                if errors.look():
                    return 1, False, False
                if (now := time.monotonic()) > counted_from + self._limit:
                    made_steps = last > 0 and now - last_at < self._limit * MAKES_STEPS
                    return 1, True, made_steps or is_starved(agent.pid)
        finally:
            if agent.poll() is None:
                rounds.end()
            _end(agent)


def _killed(place: Path) -> int:
    """How many processes were."""
    return len(list(place.glob(record.KILLS)))


def _dead(place: Path) -> int:
    """How many of these wait for nothing any more."""
    return sum(path.stat().st_size > 0 for path in place.glob(record.KILLS))


def _end(agent: RunAgent) -> None:
    """The agent, and all that it has started."""
    if agent.poll() is None:
        agent.send_signal(signal.SIGTERM)
        try:
            agent.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            agent.send_signal(signal.SIGKILL, group=True)
            agent.wait()


def refusal_in(log: str) -> str:
    """The last sentence by which Everstep refused a script, as it stands in the log."""
    found = re.findall(
        r"(?:LoopError|NotRecoverable|StateMismatch|SettingUnusable|StepUnusable): "
        r"(.+(?:\n(?!\[rank\d|[\w.]*Error|\S+:\s|=+|\d\d:\d\d:\d\d).+)*)",
        log,
    )
    return str(found[-1]).strip() if found else ""


def line_in(log: str, folder: Path) -> str:
    """The script's innermost line in the last traceback, or below the last refusal, as "train.py:12 (x = y)"; or "".
    `folder`: of the script's files."""
    found = re.findall(r'File "([^"\n]+)", line (\d+)[^\n]*\n(?:\[rank\d+\]:)?([^\n]*)', log)
    own = [(Path(file), line, text.strip()) for file, line, text in found if Path(file).is_relative_to(folder)]
    if not own:
        return ""
    file, line, text = own[-1]
    code = text if len(text) <= MOST_CODE else f"{text[:MOST_CODE]}…"
    return f"{file.relative_to(folder)}:{line} ({code})" if code else f"{file.relative_to(folder)}:{line}"


def carried_in(log: str) -> str:
    """The names in the warning of the first start, each with its place."""
    found = re.search(r"carried by the loop and not tracked: (.+?)\. In a new process", log, re.S)
    return " ".join(found[1].split()) if found else ""


def loaded_in(log: str) -> str:
    """The names in the session's warning of what the script has loaded."""
    found = re.search(r"loaded before the first step: (.+?)\. They have", log, re.S)
    return " ".join(found[1].split()) if found else ""


def _copied(source: Path, target: Path, own: Path) -> Path | None:
    """A copy of the folder in which the script is started, so that what it writes there is written beside the user's
    own files; None if the folder is too large to be copied: then the script runs in it. `own`: that of the rehearsal,
    which may lie in the folder, as /tmp does where a script is tried."""
    files, size = 0, 0
    own = own.resolve()
    source = source.resolve()
    for path in source.rglob("*"):
        if _left_out(path.relative_to(source)) or not path.is_file() or path.is_relative_to(own):
            continue
        files, size = files + 1, size + path.stat().st_size
        if files > COPIED_FILES or size > COPIED_BYTES:
            return None

    links: list[Path] = []

    def ignored(folder: str, names: list[str]) -> list[str]:
        found = []
        for path in (Path(folder, name) for name in names):
            if path.is_symlink() and not _left_out(Path(path.name)):
                links.append(path)
            is_special = not (path.is_file() or path.is_dir())  # a pipe, a socket
            if path.is_symlink() or is_special or _left_out(Path(path.name)) or path == own:
                found.append(path.name)
        return found

    shutil.copytree(source, target, ignore=ignored)
    for link in links:
        to, place = link.resolve(), target / link.relative_to(source)
        inside = to.is_relative_to(source)
        for path in () if inside else to.rglob("*") if to.is_dir() else (to,):
            files, size = files + 1, size + (path.stat().st_size if path.is_file() else 0)
            if files > COPIED_FILES or size > COPIED_BYTES:
                break
        if inside and not _left_out(to.relative_to(source)):
            place.symlink_to(target / to.relative_to(source))
        elif inside or not to.exists() or files > COPIED_FILES or size > COPIED_BYTES:
            place.symlink_to(to)
        elif to.is_dir():
            shutil.copytree(to, place, symlinks=True)
        else:
            shutil.copy2(to, place)
    return target


def _left_out(path: Path) -> bool:
    return any(part in LEFT_OUT or part.startswith(".") for part in path.parts)


def _stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Of each file its size, and when it was written last."""
    found = (path for path in folder.rglob("*") if path.is_file() and not _left_out(path.relative_to(folder)))
    return {path.relative_to(folder).as_posix(): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}
