"""A refusal is found whatever way it comes to the top of a program, and nothing else is taken for one."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

from everstep.checkpoint.errors import (
    CheckpointError,
    Damaged,
    Fenced,
    NoCommit,
    Occupied,
    SaveFailed,
    SettingUnusable,
    StateMismatch,
    UnsupportedVersion,
)
from everstep.contract import refusal
from everstep.data import errors as data
from everstep.recovery.errors import LoopError
from everstep.recovery.group.in_flight import PeerLost
from everstep.recovery.sharding.fsdp import NotRecoverable
from everstep.roles.wire import HubLost, RolesError
from everstep.storage.errors import RetryableError, Throttled
from everstep.train.step import StepUnusable
from everstep_sources import CacheError, CacheFull

SAID = "write run.track(model=model)"


def raised(do: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as found:
        do()
    return found.value


def from_another() -> None:
    raise ValueError("no data") from LoopError(SAID)


def while_it_is_handled() -> None:
    try:
        raise StateMismatch(SAID)
    except StateMismatch:
        raise ValueError("no data")  # noqa: B904


def hidden() -> None:
    try:
        raise StateMismatch(SAID)
    except StateMismatch:
        raise ValueError("no data") from None


def in_a_group() -> None:
    raise ExceptionGroup("threads", [OSError("x"), ExceptionGroup("more", [LoopError(SAID)])])


def exits() -> None:
    try:
        raise LoopError(SAID)
    except LoopError:
        raise SystemExit(3)  # noqa: B904


def from_a_cause() -> None:
    try:
        raise KeyError("fc.weight")
    except KeyError as e:
        raise StateMismatch(SAID) from e


@pytest.mark.parametrize("do", [from_another, while_it_is_handled, hidden, in_a_group, exits, from_a_cause])
def test_refusal_is_found_behind_what_was_raised_when_it_was_caught(do: Callable[[], object]) -> None:
    error = raised(do)
    found = refusal.find(error)
    assert found is not None
    assert refusal.sentence(found).endswith(f": {SAID}")
    assert refusal.refused_after(error) == refusal.steps_done()


@pytest.mark.parametrize(
    "kind",
    [
        LoopError, NotRecoverable, StepUnusable, StateMismatch, UnsupportedVersion, SettingUnusable, RolesError,
        data.DataError, data.DatasetUnusable, data.BatchUnusable, data.DatasetChanged, data.PositionMismatch,
        data.Unacknowledged, data.LoaderUnusable,
    ],
)  # fmt: skip
def test_class_is_one_of_refusals_also_behind_pickle(kind: type[Exception]) -> None:
    errors: list[Exception] = [kind(SAID), pickle.loads(pickle.dumps(kind(SAID)))]
    for error in errors:
        assert refusal.find(error) is error
        assert refusal.sentence(error) == f"{kind.__name__}: {SAID}"


@pytest.mark.parametrize(
    "kind",
    [
        CheckpointError, Damaged, Fenced, NoCommit, Occupied, SaveFailed, CacheError, CacheFull, PeerLost,
        HubLost, RetryableError, Throttled, ValueError, OSError, KeyboardInterrupt,
    ],
)  # fmt: skip
def test_class_is_none_of_refusals(kind: type[BaseException]) -> None:
    assert refusal.find(kind(SAID)) is None
    assert refusal.refused_after(kind(SAID)) is None


@pytest.mark.parametrize("cause", [OSError("no space"), ConnectionError("reset"), CacheError("away"), MemoryError()])
def test_what_a_restart_may_heal_is_no_refusal(cause: BaseException) -> None:
    def do() -> None:
        raise data.DatasetUnusable("shard 3 cannot be read") from cause

    assert refusal.find(raised(do)) is None


@pytest.mark.parametrize("error", [OSError(28, "full"), ConnectionResetError(), MemoryError(), RetryableError(SAID)])
def test_what_a_restart_may_heal_is_no_refusal_because_it_came_while_one_was_handled(error: Exception) -> None:
    """A script that catches a refusal and trains in its `except` block."""

    def do() -> None:
        try:
            raise LoopError(SAID)
        except LoopError:
            raise error  # noqa: B904  as such a script does

    assert refusal.find(raised(do)) is None


def test_error_that_says_that_a_restart_may_help_is_none_whatever_led_to_it() -> None:
    def do() -> None:
        raise LoopError("rank 1 did not come", certain=False) from LoopError(SAID)

    assert refusal.find(raised(do)) is None


def test_search_ends_for_errors_that_lead_to_each_other() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert refusal.find(one) is None


class Refuses(Dataset[int]):
    def __init__(self, make: Callable[[], Exception], cause: Exception | None = None) -> None:
        self.make, self.cause = make, cause

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise self.make() from self.cause


def unusable() -> Exception:
    return data.DatasetUnusable(SAID)


def uncertain() -> Exception:
    return LoopError(SAID, certain=False)


def test_refusal_in_a_loaders_worker_is_told_by_its_sentence() -> None:
    error = raised(lambda: list(DataLoader(Refuses(unusable), num_workers=1)))
    found = refusal.find(error)
    assert found is not None
    assert refusal.sentence(found) == f"DatasetUnusable: {SAID}"


@pytest.mark.long
@pytest.mark.parametrize("dataset", [Refuses(uncertain), Refuses(unusable, OSError("input/output error"))])
def test_error_of_a_loaders_worker_that_a_restart_may_heal_is_no_refusal(dataset: Refuses) -> None:
    assert refusal.find(raised(lambda: list(DataLoader(dataset, num_workers=1)))) is None


def refuses(_: int, certain: bool) -> None:
    raise LoopError(SAID, certain=certain)


@pytest.mark.parametrize("certain", [True, False])
def test_refusal_in_a_process_that_torch_has_spawned_is_known_by_its_text(certain: bool) -> None:
    error = raised(lambda: mp.start_processes(refuses, (certain,), start_method="fork"))  # type: ignore[attr-defined]
    found = refusal.find(error)
    assert (found is not None) is certain
    if found is not None:
        assert refusal.sentence(found) == f"LoopError: {SAID}"
