"""What the client answers: frozen data, which a notebook shows as a table. Every text in it is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, ClassVar, TypeVar

from everstep.jobs.view import View, ended


class _Shown:
    """One row of a table, with these of its fields."""

    __slots__ = ()
    COLUMNS: ClassVar[tuple[str, ...]] = ()


Item = TypeVar("Item", bound=_Shown)


class Rows(tuple[Item, ...]):
    """A tuple that a notebook shows as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        if not self:
            return "<p>none</p>"
        columns = self[0].COLUMNS
        return _table(columns, ([getattr(row, column) for column in columns] for row in self))


@dataclass(frozen=True, slots=True)
class Worker(_Shown):
    """A pod of a job. `rank`, `step` and `memory` (bytes, its processes' greatest peak) are None on a cluster, whose
    API does not have them."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("worker", "pod", "node", "state", "incarnation", "rank", "step")

    worker: int
    pod: str
    node: str
    state: str
    incarnation: int  # how many pods this worker had before
    rank: int | None
    step: int | None
    memory: int | None


@dataclass(frozen=True, slots=True)
class Job(_Shown):
    """A job as it was when it was asked for; `TrainingClient.get_job` asks again."""

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "name",
        "status",
        "step",
        "total_steps",
        "committed",
        "size",
        "restarts",
        "message",
        "place",
    )

    name: str
    namespace: str  # empty for a run of this machine
    place: str  # `local run digits`, or `namespace ml of context prod`
    status: str  # one of `STATUSES`
    message: str
    step: int | None
    total_steps: int | None
    committed: int | None  # the step of the newest commit
    size: int  # workers of the present round
    round: int
    restarts: int
    goodput: str
    began: str  # RFC 3339; empty if it is not known
    ended: bool
    workers: Rows[Worker] = field(default_factory=Rows[Worker])

    @classmethod
    def of(cls, view: View, place: str) -> Job:
        rows = Rows(
            Worker(row.worker, row.pod, row.node, row.state, row.incarnation, row.rank, row.step, row.memory)
            for row in view.workers
        )
        return cls(
            name=view.job, namespace=view.namespace, place=place, status=view.status, message=view.message,
            step=view.step, total_steps=view.total_steps, committed=view.committed, size=view.size, round=view.round,
            restarts=view.restarts, goodput=view.goodput, began=view.began, ended=ended(view.raw_status), workers=rows,
        )  # fmt: skip

    def _repr_html_(self) -> str:
        own = _table(self.COLUMNS, [[getattr(self, column) for column in self.COLUMNS]])
        return own + self.workers._repr_html_() if self.workers else own


@dataclass(frozen=True, slots=True)
class Event(_Shown):
    """`at`: RFC 3339; empty if it is not known."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("at", "type", "reason", "message")

    at: str
    type: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Checkpoint(_Shown):
    """A commit in the job's log."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("step", "at", "world_size", "bytes", "pinned", "complete", "tags")

    step: int
    record: int  # its number in the log
    url: str  # of the log that has it
    at: str  # RFC 3339
    world_size: int
    bytes: int
    pinned: bool
    complete: bool  # all its shards are there; their bytes were not read
    tags: tuple[str, ...]
    metrics: Mapping[str, float]


# A job's status: the reason of its condition Ready, which kubectl shows.
STATUSES = (
    "Pending", "WaitingForQuorum", "Running", "RunningDegraded", "Resizing", "Updating", "Recovering", "Suspended",
    "Queued", "Complete", "Failed", "Deleted",
)  # fmt: skip


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = ("<tr>" + "".join(f"<td>{escape(_text(value))}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
