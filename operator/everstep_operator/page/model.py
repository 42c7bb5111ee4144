"""What the page shows, and whom it asks. Every fact is one that the commands print: `everstep.jobs` has their forms."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from aiohttp import web

from everstep.jobs.history import Entry
from everstep.jobs.view import EventRow, View
from everstep_operator.errors import RetryableError, TerminalError

# Whether the reader may see the jobs of this namespace. It raises `Unavailable` where that cannot be known.
May: TypeAlias = Callable[[str], Awaitable[bool]]


class JobUnknown(TerminalError):
    """There is no such job, or the reader may not see it: both look alike."""


class Unavailable(RetryableError):
    """Whoever knows does not answer now. The text says who and why."""


class Commit(Protocol):
    """A commit in a job's log, as `everstep.client` has it."""

    @property
    def step(self) -> int: ...

    @property
    def at(self) -> str: ...

    @property
    def world_size(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def pinned(self) -> bool: ...

    @property
    def complete(self) -> bool: ...

    @property
    def tags(self) -> tuple[str, ...]: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class Listed:
    """`key` names the job in the page's addresses; `where` is its namespace, or the title of its run."""

    key: str
    where: str
    view: View


@dataclass(frozen=True, slots=True)
class Fleet:
    """`notes`: what could not be read, and why."""

    jobs: Sequence[Listed]
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Detail:
    """One job. `history` is in seconds since `view.began`; `seen` says since when it was written. `commits` None: they
    cannot be listed from here, `commits_note` says why. `stacks`: whether its processes can be asked for their stacks,
    else None."""

    listed: Listed
    events: Sequence[EventRow]
    history: Sequence[Entry] = ()
    seen: str = ""
    commits: Sequence[Commit] | None = None
    commits_note: str = ""
    stacks: str | None = None  # the command that prints them, if it cannot be done here
    notes: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Stack:
    """Where a rank is, and the stacks of its threads; empty if it has written none."""

    rank: str
    state: str
    text: str


class Jobs(Protocol):
    """Where the jobs come from. Methods raise `JobUnknown` and `Unavailable`."""

    async def fleet(self, may: May) -> Fleet: ...

    async def detail(self, may: May, key: str) -> Detail: ...

    async def stacks(self, may: May, key: str) -> Sequence[Stack]:
        """Raises `Unavailable` where processes cannot be asked."""
        ...


class Access(Protocol):
    """Who may read."""

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add paths of its own, as that of a form for a token."""
        ...

    async def admit(self, request: web.Request) -> May | web.Response:
        """What the reader may see, or the answer to a stranger. Raises `Unavailable`."""
        ...

    def shown(self, request: web.Request) -> Mapping[str, Any]:
        """What the head of the page says about the reader: `user`, and `leave`, the path that forgets its token."""
        ...
