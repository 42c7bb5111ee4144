"""A job that is struck in one phase after the other, beside what an undisturbed run would have."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.agent import phase_script
from support.agent.agent_job import EXPIRING, Agent, Job
from support.agent.phase_script import undisturbed
from support.agent.phases import Aim, Fault
from support.processes.children import children
from support.processes.commits import newest_commit

SCRIPT = phase_script.__file__
EVERY = 20  # steps between two commits


@dataclass(frozen=True)
class Cell:
    """`stage`: what goes on when it strikes, see `Field._begin`. `who`: "new"; or of the processes that stay "holder",
    the one of lowest rank, and "other", the one of highest; or "rank 0" by the rank in the round at hand."""

    stage: str
    point: str
    who: str
    fault: Fault
    nth: int = 1
    processes: int = 1

    @property
    def job(self) -> dict[str, Any]:
        """The `Field` that it is for: three agents of a process each, or two of several."""
        if self.processes > 1:
            return {"nodes": "1:2", "count": 2, "processes": self.processes}
        return {"nodes": "3" if self.stage == "fixed" else "2:3", "count": 3, "processes": 1}

    @property
    def goes_back(self) -> bool:
        """Whether nobody who can go on has the newest step: two agents lost a process each, and the one that was the
        first to, and waits with older steps since, is the first to be whole again."""
        return self.processes > 1 and self.stage == "grow" and self.who == "holder"

    def __str__(self) -> str:
        point = self.point.replace("/", "").replace(" ", "_")
        several = f"{self.processes}_each-" if self.processes > 1 else ""
        return (
            f"{several}{self.stage}-{point}{self.nth if self.nth > 1 else ''}-{self.who.replace(' ', '_')}-{self.fault}"
        )


@dataclass(frozen=True)
class Place:
    agent: Agent
    pid: int
    round: int


class Field:
    """`count` agents of `processes` processes. Use as a context manager."""

    def __init__(self, folder: Path, endpoint: str, *, nodes: str, count: int, processes: int) -> None:
        self.folder, self._count, self._processes = folder, count, processes
        wanted = {"out": str(folder), "url": str(folder / "c"), "every_steps": EVERY}
        flags = [f"--nproc-per-node={processes}", "--max-restarts=0"]
        self.job = Job(folder, endpoint, str(SCRIPT), json.dumps(wanted), nodes=nodes, flags=flags, cold=True)
        self.agents: list[Agent] = []
        self.whole_again = False
        self._run: Iterator[str] = undisturbed()
        self._right = [next(self._run)]
        self._checked: dict[int, int] = {}
        self._struck = 0
        self._since = 0.0  # when the cell at hand began
        self._loaded = 0  # the newest commit that a cell has loaded

    def __enter__(self) -> Field:
        began = time.monotonic()
        self.agents = self.job.start(self._count, EXPIRING)
        self.trains(self.agents, began)
        self.whole_again = True
        return self

    def __exit__(self, *_: object) -> None:
        self.job.__exit__()
        self.job.until(lambda: not self.job.left_behind(), "processes were left behind", 10)

    def trains(self, agents: Iterable[Agent], since: float) -> list[dict[str, Any]]:
        """Wait until all processes of these agents, and no others, train together; their first steps."""
        agents = list(agents)
        problem = f"no world of agents {[a.number for a in agents]}"
        world: list[dict[str, Any]] = self.job.until(lambda: self._whole(agents, since), problem)
        return world

    def _whole(self, agents: list[Agent], since: float) -> list[dict[str, Any]]:
        """The first steps that all processes of these agents, and no others, made together; none if they did not."""
        pids = [pid for agent in agents for pid in agent.trainers()]
        return self.job.trains(pids, since, len(pids)) if len(pids) == len(agents) * self._processes else []

    def places(self) -> dict[int, Place]:
        """The training processes by the rank that they had last."""
        found = {}
        for agent in self.agents:
            for pid in agent.trainers():
                last = self.job.steps(pid)[-1]
                found[last["rank"]] = Place(agent, pid, last["round"])
        assert len(found) == self._count * self._processes
        return found

    def hit(self, cell: Cell, tries: int = 3) -> None:
        """Let it happen, wait until all train again, and look at what they have. Raises AssertionError.

        A survivor that has no processor for a while hears of the death when the dead one's successor is there already:
        then there is no smaller round to strike in, and it is begun again.
        """
        self.whole_again = False
        self._since = time.monotonic()
        before = self.places()
        # What is left once the stage's own fault has happened: by rank.
        stay = self._staying(cell.stage, before)
        names: dict[str, int | str] = {"holder": stay[0].pid, "other": stay[-1].pid} if stay else {}
        if cell.stage == "load":  # a commit that was loaded three times and came to nothing is stepped over
            self.job.until(lambda: self.committed() > self._loaded, "no commit")
            self._loaded = self.committed()
        after, size = self._when(cell, before)
        self._struck += 1
        aim = Aim(self._struck, cell.point, names.get(cell.who, cell.who), cell.fault, cell.nth, after, size)
        aim.put(self.folder)
        self._begin(cell.stage, before)
        begun = time.monotonic()
        self.job.until(
            lambda: aim.taken(self.folder) or (cell.stage == "shrink" and self._whole(self.agents, begun)),
            f"{cell}: nobody came to {cell.point!r}",
        )
        if aim.withdrawn(self.folder):
            assert tries > 1, f"{cell}: nobody came to {cell.point!r}"
            print(f"{cell}: who was killed was there again before the others went on without it")
            self.hit(cell, tries - 1)
            return
        struck = self.job.until(lambda: aim.struck(self.folder), f"{cell}: it does not say so")
        at = struck["at"]
        hit = next(a for a in self.agents if a.pid == struck["agent"])
        others = [a for a in self.agents if a is not hit]
        if cell.fault == "agent":
            hit.process.wait()
            self.agents = [*others, *self.job.start(conf=EXPIRING)]
        elif cell.fault == "stop":
            first = self.trains(others, at)
            print(f"{cell}: the others train {max(e['at'] for e in first) - at:.2f} s after it stopped")
            for pid in reversed([hit.pid, *hit.fork_servers(), *(p for w in hit.fork_servers() for p in children(w))]):
                os.kill(pid, signal.SIGCONT)
        first = self.trains(self.agents, at)
        print(f"{cell}: all train {max(e['at'] for e in first) - at:.2f} s after it")
        gone = {struck["pid"]} | (
            {p.pid for p in before.values() if p.agent is hit} if cell.fault == "agent" else set()
        )
        self.check(cell, struck, {place.pid for place in stay} - gone)
        self.whole_again = True

    def check(self, cell: Cell, struck: dict[str, Any], kept: Iterable[int]) -> None:
        """The same bits as undisturbed, not more than a step again, nobody charged, innocents in their processes."""
        at = struck["at"]
        for pid, events in self.fresh().items():
            for e in events:
                if "digest" in e:
                    assert e["digest"] == self.right(e["step"]), f"{cell}: process {pid}, {e}"
        told = [(pid, e) for pid in self._pids() for e in self.job.steps(pid)[-1000:]]
        # Not what was reached before an earlier cell had all begin again from a commit.
        reached = max((e["step"] for _, e in told if self._since <= e["at"] <= at), default=0)
        again = min(e["step"] for pid, e in told if e["at"] > at and pid != struck["pid"])
        least = self._loaded + 1 if cell.stage == "load" else reached - (2 * EVERY if cell.goes_back else 0)
        assert again >= least, f"{cell}: step {reached} was complete, and step {again} came again"
        assert all(a.process.poll() is None for a in self.agents), f"{cell}: an agent has ended"
        here = [pid for a in self.agents for pid in a.trainers()]
        assert len(here) == self._count * self._processes, f"{cell}: training processes {here}"
        assert set(kept) <= set(here), f"{cell}: of {sorted(kept)} not all are among {here}"

    def fresh(self) -> dict[int, list[dict[str, Any]]]:
        """By process, what it has said since this was asked last."""
        found = {}
        for pid in self._pids():
            events = self.job.events(pid)
            found[pid] = events[self._checked.get(pid, 0) :]
            self._checked[pid] = len(events)
        return found

    def committed(self) -> int:
        """The step of the newest commit."""
        return newest_commit(self.folder / "c")

    def right(self, step: int) -> str:
        """The digest after this step of an undisturbed run."""
        while len(self._right) <= step:
            self._right.append(next(self._run))
        return self._right[step]

    def _pids(self) -> list[int]:
        return [int(path.stem) for path in self.folder.glob("*.jsonl")]

    # --- stages

    def _staying(self, stage: str, before: dict[int, Place]) -> list[Place]:
        match stage:
            case "shrink" | "grow":  # the process of highest rank is killed, the others go on, its successor comes
                return [before[rank] for rank in sorted(before)[:-1]]
            case "fixed":  # that of rank 0 is, and the others wait for its successor
                return [before[rank] for rank in sorted(before)[1:]]
            case "training" | "save":  # nothing else has happened
                return [before[rank] for rank in sorted(before)]
            case "load":  # all processes are killed at once
                return []
        raise ValueError(stage)

    def _when(self, cell: Cell, before: dict[int, Place]) -> tuple[int, int]:
        """The round and the size that are aimed at: above the one, of the other."""
        now = max(place.round for place in before.values())
        if cell.point.endswith("ready"):  # for its first round
            return -2, 0
        match cell.stage:
            case "shrink":
                return now, (self._count - 1) * self._processes
            case "grow" | "fixed":
                return now, len(before)
            case "load":
                return now, 0
        return -2, 0

    def _begin(self, stage: str, before: dict[int, Place]) -> None:
        stay = self._staying(stage, before)
        for place in before.values():
            if place not in stay:
                os.kill(place.pid, signal.SIGKILL)
