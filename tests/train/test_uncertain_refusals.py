"""A refusal that rests on time is a failure like others: a slow disk or a busy machine may be the reason, and a restart
may help. Only what is wrong by the script itself ends a job at once (`contract/refusal.py`)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch._C._distributed_c10d import HashStore

from everstep.contract.refusal import refused_after, steps_done
from everstep.recovery.announcements import AnnouncedRound
from everstep.recovery.errors import LoopError
from everstep.recovery.forming import forming
from everstep.recovery.group.program_groups import ProgramGroups
from everstep.train import early_exit


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_exit, "LEAST_SECONDS", 0.0)


@pytest.mark.parametrize("meet", [early_exit.all_leave, early_exit.all_left_out])
def test_rank_that_does_not_come_in_time_is_no_refusal_that_ends_a_job(meet: Callable[..., None]) -> None:
    with pytest.raises(LoopError, match="within 0 s") as found:
        meet(HashStore(), 0, 2, 1, 0.0)
    assert refused_after(found.value) is None


def test_ranks_that_left_after_other_steps_are_refused_for_good() -> None:
    store = HashStore()
    store.set("everstep/left/1", "2")
    with pytest.raises(LoopError, match="after other steps each") as found:
        early_exit.all_leave(store, 0, 2, 1, 0.0)
    assert refused_after(found.value) == steps_done()


@pytest.mark.parametrize("certain", [True, False])
def test_peers_are_told_whether_a_refusal_rests_on_time(certain: bool) -> None:
    groups = cast(Any, SimpleNamespace(refusal=LoopError("rank 0 left", certain=certain)))
    made = cast(Any, ProgramGroups.made).fget(groups)
    store = HashStore()
    store.set("made/0", made)
    alone = cast(AnnouncedRound, SimpleNamespace(rank=1, world_size=2))
    with pytest.raises(LoopError, match=r"^rank 0 left") as found:
        forming._check_made(store, alone, "")
    assert refused_after(found.value) == (steps_done() if certain else None)
