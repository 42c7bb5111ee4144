"""A process, or an agent with it, is killed or stopped at a named point of a recovery, a save or a load.

Afterwards all have the parameters, the optimizer and the place in the data of an undisturbed run, to the bit; a step is
repeated at most; who was not struck keeps its process. One job is struck again and again. A few cells in `make test`,
all in `make soak`; `-k grow-sending` plays some.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.agent.phase_field import Cell, Field
from support.rendezvous.etcd_server import EtcdCluster

pytestmark = pytest.mark.timeout(240)

FAULTS = ("process", "agent", "stop")
FORMING = (("coming", 1), ("forming", 1), ("connecting", 1), ("connecting", 2), ("formed", 1))
AGREEING = (("agreeing", 1), ("agreed", 1))
SENDING = (("sending first", 1), ("sending middle", 1), ("sending last", 1))
RECEIVING = (("receiving first", 1), ("receiving middle", 1), ("receiving last", 1), ("applying", 1), ("applied", 1))
GOING_ON = (("rebuilding", 1), ("joined", 1), ("collective", 1), ("optimizer", 1), ("tail", 1))
STAYS = (*FORMING, *AGREEING, *GOING_ON)
COMES = (("ready", 1), ("is ready", 1), *FORMING, *AGREEING, *RECEIVING, *GOING_ON)
ALL_SAVE = (("save", 1), ("put data/", 1), ("put data/ done", 1), ("put data/", 2))
FIRST_COMMITS = (("create log/", 1), ("create log/ done", 1))
LOADS = (("load", 1), ("get_into data/", 1), ("get_into data/ done", 1), ("loaded", 1), *SENDING)

FIRST = (("collective", 1), ("optimizer", 1), ("tail", 1))

PHASES = {
    ("training", "holder"): FIRST,
    ("training", "other"): FIRST,
    ("shrink", "holder"): STAYS,
    ("shrink", "other"): STAYS,
    ("grow", "holder"): (*FORMING, *AGREEING, *SENDING, *GOING_ON),
    ("grow", "other"): (*STAYS, ("receiving middle", 1)),
    ("grow", "new"): COMES,
    ("fixed", "holder"): (*FORMING, *AGREEING, *SENDING, *GOING_ON),
    ("fixed", "new"): COMES,
    ("save", "holder"): (*ALL_SAVE, *FIRST_COMMITS),
    ("save", "other"): ALL_SAVE,
    ("load", "rank 0"): LOADS[:4],
    ("load", "rank 1"): LOADS[:4],
}
CELLS = [
    Cell(stage, point, who, fault, nth)  # type: ignore[arg-type]
    for fault in FAULTS
    for (stage, who), points in PHASES.items()
    for point, nth in points
    if not (stage == "fixed" and fault == "stop")  # the others wait until it wakes, as it is meant
]
# With two processes an agent: rank 2 stays beside rank 3, which is killed, or is struck.
CELLS += [
    Cell(stage, point, who, fault, 1, processes=2)  # type: ignore[arg-type]
    for stage, point, who, fault in (
        ("training", "collective", "other", "process"),
        ("training", "tail", "holder", "process"),
        ("training", "collective", "other", "agent"),
        ("training", "optimizer", "holder", "agent"),
        ("training", "collective", "other", "stop"),
        ("shrink", "agreeing", "holder", "process"),
        ("shrink", "collective", "rank 1", "process"),
        ("grow", "is ready", "new", "process"),
        ("grow", "forming", "new", "agent"),
        ("grow", "receiving middle", "other", "process"),
        ("grow", "receiving last", "new", "process"),
        ("grow", "applied", "other", "process"),
        ("grow", "sending middle", "holder", "process"),
        ("grow", "collective", "new", "process"),
        ("save", "put data/", "other", "process"),
        ("load", "get_into data/", "rank 1", "process"),
        ("load", "loaded", "rank 0", "agent"),
    )
]


class Fields:
    """One job for all cells of a kind, and another when one came out of it broken."""

    def __init__(self, etcd: Any, folders: Any) -> None:
        self._endpoint = etcd.urls[0].removeprefix("http://")
        self._folders = folders
        self._now: tuple[dict[str, Any], Field] | None = None

    def get(self, **options: Any) -> Field:
        if self._now is None or self._now[0] != options or not self._now[1].whole_again:
            self.close()
            field = Field(self._folders.mktemp("field"), self._endpoint, **options)
            self._now = (options, field)
            field.__enter__()
        return self._now[1]

    def close(self) -> None:
        if self._now is not None:
            (_, field), self._now = self._now, None
            field.__exit__()


@pytest.fixture(scope="module")
def fields(etcd: EtcdCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fields]:
    made = Fields(etcd, tmp_path_factory)
    yield made
    made.close()


@pytest.mark.long_but("save-put_data-other-process")
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_struck_at_a_point_of_a_recovery_all_go_on_with_the_bits_of_an_undisturbed_run(
    cell: Cell, fields: Fields
) -> None:
    """Case 46, and every phase: join, forming, first step, save, load, state transfer."""
    fields.get(**cell.job).hit(cell)
