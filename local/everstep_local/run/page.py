"""The page about the runs of this machine: `everstep ui`, and `everstep run --ui`.

A run that is alive is asked over its socket, whoever serves the page; one that has ended is read from its folder. What
blocks is done in threads, so that the page answers others meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from everstep.cli import agents
from everstep.cli.stacks import SECONDS, state_of
from everstep.client.commits import commits
from everstep.client.errors import ClientError
from everstep.client.shapes import Checkpoint
from everstep.contract.agent_requests import STACKS
from everstep.jobs.source import JobError, RunEnded, Where
from everstep.jobs.view import View
from everstep_local.run.sources import EndedRun, LiveRun, alive, kept_runs
from everstep_operator.page.links import LinkAccess
from everstep_operator.page.model import Detail, Fleet, JobUnknown, Listed, May, Stack, Unavailable
from everstep_operator.page.server import Page, server

HOST = "127.0.0.1"
# For a list of commits, while no newer one is reported: of a folder, and of a store, which counts requests.
KEPT_SECONDS, KEPT_SECONDS_OF_STORE = 2.0, 30.0
MAX_KEPT = 32  # lists of commits


@dataclass(frozen=True, slots=True)
class _Seen:
    run: LiveRun | EndedRun
    view: View
    folder: Path

    @property
    def key(self) -> str:
        return key_of(self.folder)

    def listed(self) -> Listed:
        return Listed(self.key, self.run.title, self.view)


def key_of(folder: Path) -> str:
    """Names the run with this folder, alive or ended, and no other one."""
    whole = folder.resolve()
    return f"{whole.name}-{hashlib.sha256(str(whole).encode()).hexdigest()[:8]}"


class LocalJobs:
    """The runs that are alive, that which left the folder `out`, and those that left one under `runs`."""

    def __init__(self, runs: str, out: Path | None = None) -> None:
        self._runs, self._out = runs, out
        self._commits: dict[str, tuple[object, float, Sequence[Checkpoint]]] = {}  # by URL

    async def fleet(self, may: May) -> Fleet:
        del may  # whoever has the token may see all
        notes: list[str] = []
        seen = await asyncio.to_thread(lambda: list(self._seen(notes)))
        return Fleet([each.listed() for each in seen], notes)

    async def detail(self, may: May, key: str) -> Detail:
        del may
        try:
            try:
                return await asyncio.to_thread(self._detail, key)
            except RunEnded:
                return await asyncio.to_thread(self._detail, key)  # what it left is there now
        except JobError as e:
            raise Unavailable(str(e)) from e

    async def stacks(self, may: May, key: str) -> Sequence[Stack]:
        del may
        return await asyncio.to_thread(self._stacks, key)

    def newest(self, name: str) -> str:
        """The key of the newest run of that name, one that is alive first. Raises `JobError` if there is none."""
        seen = list(self._seen([]))
        for each in seen:
            if name in (each.view.job, each.folder.name):
                return each.key
        names = ", ".join(dict.fromkeys(each.view.job for each in seen)) or "none"
        raise JobError(f"no local run {name!r} is alive or left a folder under {self._runs}; there are {names}")

    def _seen(self, notes: list[str]) -> Iterator[_Seen]:
        """Those that are alive first, the newest first."""
        folders: set[Path] = set()
        for run in reversed(alive()):
            assert isinstance(run, LiveRun)
            try:
                view = run.view(run.name)
            except RunEnded:
                continue  # it is among the others
            except JobError as e:
                notes.append(str(e))
                continue
            if run.folder is not None:
                folders.add(run.folder)
                yield _Seen(run, view, run.folder)
        left, problems = kept_runs(self._runs)
        notes += problems
        for each in [*([EndedRun(self._out, self._out.name)] if self._out is not None else []), *left]:
            folder = each.folder.resolve()
            if folder in folders:  # of an earlier run that had the folder of one that is alive
                continue
            try:
                yield _Seen(each, each.view(each.name), folder)
            except JobError as e:
                notes.append(str(e))

    def _find(self, key: str) -> _Seen:
        for each in self._seen([]):
            if each.key == key:
                return each
        raise JobUnknown(key)

    def _detail(self, key: str) -> Detail:
        seen = self._find(key)
        run, view = seen.run, seen.view
        notes: list[str] = []
        try:
            history = run.history()
            events = run.events(run.name)
        except RunEnded:
            raise
        except JobError as e:
            notes, history, events = [str(e)], [], list(view.events)
        kept, problem = self._commits_of(view)
        lives = isinstance(run, LiveRun)
        return Detail(seen.listed(), events, history, "", kept, problem, None if lives else "", notes)

    def _commits_of(self, view: View) -> tuple[Sequence[Checkpoint] | None, str]:
        """Those of the job's log, or why they cannot be listed."""
        url = view.checkpoint_url
        if not url:
            return None, "Its status names no place for commits."
        newest, now = view.committed, time.monotonic()
        known = self._commits.get(url)
        kept = KEPT_SECONDS_OF_STORE if "://" in url and not url.startswith("file://") else KEPT_SECONDS
        if known is not None and known[0] == newest and now < known[1] + kept:
            return known[2], f"In {url}."
        try:
            rows = commits(url)
        except ClientError as e:
            return None, str(e)
        while len(self._commits) >= MAX_KEPT:
            del self._commits[next(iter(self._commits))]
        self._commits[url] = newest, now, rows
        return rows, f"In {url}."

    def _stacks(self, key: str) -> Sequence[Stack]:
        seen = self._find(key)
        if not isinstance(seen.run, LiveRun):
            raise Unavailable("This run has ended, so none of its processes can be asked.")
        job = (seen.run.objects(seen.run.name).get("trainingjob") or {}).get("metadata", {}).get("name", seen.run.name)
        try:
            answers = agents.ask(str(job), Where(), STACKS, SECONDS, [])
        except agents.NoAgent as e:
            raise Unavailable(str(e)) from e
        return [Stack(agents.head(each), state_of(each), str(each.get("stacks") or "")) for each in answers]


@asynccontextmanager
async def served(jobs: LocalJobs, key: str | None, port: int) -> AsyncIterator[str]:
    """Serve the page while the context is open. Gives the address that a person opens, with its token. Raises
    `JobError` where the port is taken."""
    access = LinkAccess()
    listener = server(Page(jobs, access, "this machine"), HOST, port)
    try:
        await listener.start()
    except OSError as e:
        raise JobError(f"port {port} of {HOST} cannot be listened on: {e.strerror}; give another with --port") from e
    try:
        path = f"/jobs/{key}" if key is not None else "/"
        yield f"http://{HOST}:{listener.port}{path}?token={access.token}"
    finally:
        await listener.stop()
