"""Points of a session's life at which one process can be made to end or to stop, exactly there.

Wraps the product's functions in a training process of a test; what they do is unchanged. The test aims by a file: the
first process that comes to the point that it names, and is who it names, takes the file away and strikes. A function
that has another name by now makes the script fail at once.

Points, in the order in which a recovery comes to them:
    ready -> coming -> forming -> connecting (main, control) -> formed -> agreeing -> agreed -> [load ->]
    sending | receiving (first, middle, last chunk) -> applying -> rebuilding -> joined -> collective -> optimizer ->
    tail; and of a save: save -> `put data/`, `create log/` and what else the store is asked for, with `done` after it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, TypeVar

from support.processes.children import children

T = TypeVar("T")
Fault = Literal["process", "agent", "stop", "freeze"]


@dataclass(frozen=True)
class Aim:
    """`who`: a pid, or "new" for a process that has made no step yet, or "rank 0" and so on by the rank in the round at
    hand. Only in a round above `after`, of `size` members (0: any). `nth`: of that process's times at the point.

    `fault`: the process is killed; its agent is, as by a power cut; that agent and all of its are stopped; or only the
    process is.
    """

    number: int
    point: str
    who: int | str
    fault: Fault
    nth: int = 1
    after: int = -2
    size: int = 0

    def put(self, folder: Path) -> None:
        written = folder / "aim.new"
        written.write_text(json.dumps(asdict(self)))
        written.replace(folder / "aim")

    def taken(self, folder: Path) -> bool:
        """Whether somebody has come there."""
        return not (folder / "aim").exists()

    def withdrawn(self, folder: Path) -> bool:
        """Aim no longer, if nobody has come there yet; whether nobody had."""
        try:
            (folder / "aim").unlink()
        except FileNotFoundError:
            return False
        return True

    def struck(self, folder: Path) -> dict[str, Any] | None:
        """Who it was, and when; None if nobody has come there yet."""
        path = folder / f"struck-{self.number}"
        return json.loads(path.read_text()) if path.exists() else None


class Points:
    """What this process knows of where it is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._times: dict[tuple[int, str], int] = {}
        self._lock = threading.Lock()
        self.round, self.rank, self.size = -1, -1, 0
        # A round that grows is formed in a thread of its own, while the training thread is still in the one before.
        self._here = threading.local()
        self.new = True  # the script says when it is not any more
        self.joined = False
        self.forming = False
        self.main: Any = None

    def at(self, point: str) -> None:
        """Strike here if the test aims at it."""
        try:
            aim = Aim(**json.loads((self._folder / "aim").read_text()))
        except FileNotFoundError:
            return
        round_, rank, size = getattr(self._here, "forms", (self.round, self.rank, self.size))
        who = os.getpid() if isinstance(aim.who, int) else "new" if aim.who == "new" and self.new else None
        if aim.point != point or aim.who not in (who, f"rank {rank}"):
            return
        if round_ <= aim.after or (aim.size and size != aim.size):
            return
        with self._lock:
            self._times[aim.number, point] = self._times.get((aim.number, point), 0) + 1
            if self._times[aim.number, point] != aim.nth:
                return
        with contextlib.suppress(FileNotFoundError):
            (self._folder / "aim").rename(self._folder / f"taken-{aim.number}")
            self._strike(aim)

    @contextlib.contextmanager
    def forms(self, round_: Any) -> Iterator[None]:
        """This thread forms this round."""
        self._here.forms = round_.number, round_.rank, round_.world_size
        try:
            yield
        finally:
            del self._here.forms

    def _strike(self, aim: Aim) -> None:
        warm = os.getppid()
        agent = int(Path(f"/proc/{warm}/stat").read_text().rpartition(")")[2].split()[1])
        told = {"pid": os.getpid(), "agent": agent, "at": time.monotonic(), "round": self.round, "rank": self.rank}
        written = self._folder / f"strikes-{aim.number}"
        written.write_text(json.dumps(told))
        written.replace(self._folder / f"struck-{aim.number}")
        match aim.fault:
            case "process":
                os.kill(os.getpid(), signal.SIGKILL)
            case "agent":
                os.kill(agent, signal.SIGKILL)  # and the kernel, what it has started
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                for pid in (agent, *(p for p in children(warm) if p != os.getpid()), warm, os.getpid()):
                    os.kill(pid, signal.SIGSTOP)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)


def wrap(points: Points, owner: Any, name: str, before: str | None = None, after: str | None = None) -> None:
    """`owner.name` is at point `before` when it is called, and at `after` when it has returned."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def outer(*arguments: Any, **options: Any) -> Any:
        if before is not None:
            points.at(before)
        found = inner(*arguments, **options)
        if after is not None:
            points.at(after)
        return found

    setattr(owner, name, outer)


class Chunks:
    """The members in a transfer of `count` chunks."""

    def __init__(self, members: Any, points: Points, count: int) -> None:
        self._members, self._points = members, points
        self._left, self._middle = count, count - count // 2
        self._count = count
        self.rank = members.rank

    def broadcast(self, data: Any, source: int) -> Any:
        verb = "sending" if source == self.rank else "receiving"
        places = {self._count: "first", self._middle: "middle", 1: "last"}
        if place := places.get(self._left):
            self._points.at(f"{verb} {place}")
        self._left -= 1
        return self._members.broadcast(data, source)


def arm(folder: Path) -> Points:
    """In a training process, before its run begins."""
    from everstep.checkpoint.load import reading  # noqa: PLC0415  imports torch
    from everstep.recovery.announcements import Announcements  # noqa: PLC0415
    from everstep.recovery.current_round import CurrentRound  # noqa: PLC0415
    from everstep.recovery.ddp.reducers import Reducers  # noqa: PLC0415
    from everstep.recovery.forming import forming  # noqa: PLC0415
    from everstep.recovery.group.members import Members  # noqa: PLC0415
    from everstep.recovery.group.recoverable import RecoverableGroup  # noqa: PLC0415
    from everstep.recovery.transfer import broadcast  # noqa: PLC0415
    from everstep.train.coordination.save_schedule import SaveSchedule  # noqa: PLC0415

    points = Points(folder)
    wrap(points, forming, "_form", "forming", "connected")
    _know(points, Announcements, RecoverableGroup, CurrentRound, forming)
    wrap(points, Announcements, "ready", "ready", "is ready")
    wrap(points, Announcements, "coming", "coming")
    wrap(points, CurrentRound, "_join", "formed")
    wrap(points, Members, "gather", "agreeing", "agreed")
    wrap(points, broadcast, "apply", "applying", "applied")
    wrap(points, Reducers, "rebuild", "rebuilding")
    wrap(points, SaveSchedule, "save", "save")
    wrap(points, SaveSchedule, "restore", "load", "loaded")
    inner: Any = vars(broadcast)["exchange"]  # it is imported there

    def send(divided: Any, buffers: Any, members: Any) -> None:
        count = sum(1 for tasks in divided for _ in reading._messages(tasks, buffers))
        inner(divided, buffers, Chunks(members, points, count))

    vars(broadcast)["exchange"] = send
    return points


def _know(points: Points, rounds: Any, group: Any, current: Any, forming: Any) -> None:
    """Which round this process is in, and whether it is its first."""
    wait_newer, joined, join, run, gloo, form = (
        rounds.wait_newer, rounds.joined, current._join, group._run, forming._gloo, forming._form,
    )  # fmt: skip

    def newer(self: Any, *arguments: Any) -> Any:
        found = wait_newer(self, *arguments)
        points.round, points.rank, points.size = found.number, found.rank, found.world_size
        return found

    def has_joined(self: Any, *arguments: Any) -> None:
        points.at("joined")
        joined(self, *arguments)
        points.joined = True

    def enters(self: Any, formed: Any) -> None:
        points.main = self.program.main
        join(self, formed)

    def collective(self: Any, *arguments: Any) -> Any:
        if self is points.main and points.joined:
            points.at("collective")
        return run(self, *arguments)

    def connect(*arguments: Any) -> Any:
        if points.forming:
            points.at("connecting")
        return gloo(*arguments)

    def forms(round_: Any, *arguments: Any) -> Any:
        points.forming = True
        with points.forms(round_):
            return form(round_, *arguments)

    # It stands between the session's own callers and the group, which asks whether a script called.
    inside = FunctionType(
        collective.__code__, {**globals(), "__name__": group.__module__}, closure=collective.__closure__
    )
    rounds.wait_newer, rounds.joined, current._join, group._run = newer, has_joined, enters, inside
    forming._gloo, forming._form = connect, forms


def aimed_checkpointer(url: str, points: Points, **options: Any) -> Any:
    """A Checkpointer over a folder each of whose calls is a point: `put data/`, and `put data/ done` after it."""
    from everstep.checkpoint import Checkpointer  # noqa: PLC0415  imports torch
    from everstep.storage import open_store  # noqa: PLC0415
    from everstep.storage.faults import FaultStore  # noqa: PLC0415

    class AimedStore(FaultStore):
        def call(self, operation: str, name: str, act: Callable[[], T], tear: Callable[[], None] = lambda: None) -> T:
            point = f"{operation} {name.partition('/')[0]}/"
            points.at(point)
            found = act()
            points.at(f"{point} done")
            return found

    return Checkpointer(store=AimedStore(open_store(url)), **options)
