"""The Checkpointer as a script uses it: what blocks, what raises, what is reported, and who may write."""

import json
import logging
import math
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import everstep
from everstep.checkpoint import CheckpointError, SaveFailed, StateMismatch, UnsupportedVersion
from everstep.checkpoint.format import layout
from everstep.checkpoint.format.manifest import OpenRecord
from everstep.checkpoint.handle import Committed
from everstep.checkpoint.in_session import InSession
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.log.opening import Settings
from everstep.checkpoint.ranks import Alone
from everstep.contract import env
from everstep.storage import MemoryStore, ObjectStore, RetryableError, RetryingStore, RetryPolicy, StoreUnusable
from everstep.storage import open_store as plain_store
from everstep.storage.faults import Fail, FaultStore, LoseResponse


class Stuck(FaultStore):
    """A store of which every call waits, once it is `stuck`, until it `goes_on`."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.stuck, self.goes_on = threading.Event(), threading.Event()

    def call(self, *arguments: Any) -> Any:
        assert not self.stuck.is_set() or self.goes_on.wait(30)
        return super().call(*arguments)


class Away(FaultStore):
    """A store that can be away."""

    away = False

    def call(self, *arguments: Any) -> Any:
        if self.away:
            raise RetryableError("away, by a test")
        return super().call(*arguments)


class Gate(MemoryStore):
    """A store whose writes of shards wait until the test opens the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def put(self, name: str, data: Any) -> None:
        assert not name.startswith(layout.DATA) or self.gate.wait(30)
        super().put(name, data)


def state(value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((1000,), value)}


def begun(store: ObjectStore, events: Any = None, **options: Any) -> everstep.Checkpointer:
    checkpointer = everstep.Checkpointer(store=store, on_event=events or (lambda kind, **_: None), **options)
    checkpointer.restore(state())
    return checkpointer


def value_in(store: ObjectStore) -> tuple[int | None, set[float]]:
    into = state()
    step = everstep.Checkpointer(store=store).restore(into)
    return step, set(into["w"].tolist())


@pytest.mark.long_but("local")
def test_script_that_saves_and_restores_goes_on_where_it_was(url: str, events: Any) -> None:
    with everstep.Checkpointer(url, every_steps=2, on_event=events) as checkpointer:
        assert checkpointer.restore(state()) is None
        for step in range(1, 6):
            if checkpointer.should_save(step):
                checkpointer.save(step, state(float(step))).wait(60)
    into = state()
    again = everstep.Checkpointer(url, on_event=events)
    assert again.restore(into) == 4
    assert set(into["w"].tolist()) == {4.0}
    found = again.latest()
    assert found is not None
    assert (found.step, found.world_size) == (4, 1)
    assert [f["step"] for f in events.of("committed")] == [2, 4]
    assert [f["step"] for f in events.of("restored")] == [None, 4]
    assert abs(events.of("committed")[0]["at"] - time.time()) < 60


def test_parameters_that_change_during_the_write_do_not_reach_the_checkpoint() -> None:
    # Case 82.
    store = Gate()
    checkpointer = begun(store)
    live = state(1.0)
    handle = checkpointer.save(1, live)
    live["w"].fill_(2.0)
    store.gate.set()
    handle.wait(30)
    assert value_in(store) == (1, {1.0})


def test_save_while_one_is_in_flight_waits_and_training_is_not_blocked(
    events: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # Case 81.
    store = Gate()
    checkpointer = begun(store, events, every_steps=1)
    handle = checkpointer.save(1, state(1.0))
    assert checkpointer.should_save(2) is False
    waits = checkpointer.save(3, state(3.0))
    assert not handle.done(), "nobody waited for it"
    assert not waits.done()
    assert [f["step"] for f in events.of("save-skipped")] == [2]
    assert "should_save(2) says no: the save before is still in flight" in caplog.text
    assert checkpointer.should_save(3) is False
    store.gate.set()
    assert isinstance(handle.wait(30), Committed)
    assert isinstance(waits.wait(30), Committed)
    assert checkpointer.should_save(4) is True
    checkpointer.save(4, state(4.0)).wait(30)
    assert value_in(store) == (4, {4.0})


def test_wait_that_runs_out_says_so_and_the_save_goes_on() -> None:
    store = Gate()
    checkpointer = begun(store)
    handle = checkpointer.save(1, state(1.0))
    with pytest.raises(TimeoutError, match="step 1"):
        handle.wait(0.01)
    assert checkpointer.wait(0.01) is False
    store.gate.set()
    assert checkpointer.wait(30) is True
    assert handle.done()


def test_failed_save_is_reported_and_the_next_one_works(events: Any, caplog: pytest.LogCaptureFixture) -> None:
    # Case 80, second half: later trouble never stops training.
    inner = MemoryStore()
    checkpointer = begun(inner, events)
    checkpointer.close()
    faulty = FaultStore(inner)
    checkpointer = begun(faulty, events)
    # After the two calls of the clean-up before a first save.
    faulty._faults = {len(faulty.calls) + 2: Fail(StoreUnusable("403 from now on"))}
    handle = checkpointer.save(1, state(1.0))
    with pytest.raises(SaveFailed, match="403 from now on"):
        handle.wait(30)
    assert [f["step"] for f in events.of("save-failed")] == [1]
    assert "step 1 was not saved: 403 from now on. Training goes on" in caplog.text
    checkpointer.save(2, state(2.0)).wait(30)
    assert value_in(inner) == (2, {2.0})


def test_lost_response_at_any_call_of_a_save_changes_nothing() -> None:
    # Case 71.
    counted = FaultStore(MemoryStore())
    begun(counted).save(1, state(1.0)).wait(30)
    for number in range(len(counted.calls)):
        inner = MemoryStore()
        store = RetryingStore(FaultStore(inner, {number: LoseResponse()}), sleep=lambda _: None)
        checkpointer = begun(store)
        checkpointer.save(1, state(1.0)).wait(30)
        assert value_in(inner) == (1, {1.0})
        assert sum(name.startswith("log/") for name in inner.objects) == 3, counted.calls[number]


@pytest.mark.long_but("local")
def test_older_writer_is_fenced_by_a_newer_one_at_its_next_save(url: str, events: Any) -> None:
    # Case 78.
    old = everstep.Checkpointer(url, every_steps=1, on_event=events)
    old.restore(state())
    old.save(1, state(1.0)).wait(60)
    new = everstep.Checkpointer(url)
    assert new.restore(state()) == 1
    with pytest.raises(everstep.Fenced, match="opened the log") as raised:
        old.save(2, state(2.0)).wait(60)
    assert raised.value.exit_code == 84
    for call in (lambda: old.should_save(3), lambda: old.save(3, state(3.0)), old.close):
        with pytest.raises(everstep.Fenced):
            call()
    assert len(events.of("fenced")) == 1
    new.save(2, state(20.0)).wait(60)
    assert value_in(plain_store(url)) == (2, {20.0})


def test_save_without_restore_is_refused_where_there_is_something_to_restore() -> None:
    store = MemoryStore()
    begun(store).save(7, state(7.0)).wait(30)
    with pytest.raises(CheckpointError, match="a commit that was not restored; call restore"):
        everstep.Checkpointer(store=store).save(1, state(1.0))
    assert value_in(store) == (7, {7.0})


def test_save_without_restore_works_on_an_empty_url() -> None:
    store = MemoryStore()
    everstep.Checkpointer(store=store).save(1, state(1.0)).wait(30)
    assert value_in(store) == (1, {1.0})


def job(monkeypatch: pytest.MonkeyPatch, round: int, pod: str, uid: str = "uid-1") -> None:
    monkeypatch.setenv(env.ROUND, str(round))
    monkeypatch.setenv(env.POD_NAME, pod)
    monkeypatch.setenv(env.JOB_UID, uid)


def test_pod_of_an_older_round_cannot_take_the_log_back(monkeypatch: pytest.MonkeyPatch, events: Any) -> None:
    store = MemoryStore()
    job(monkeypatch, 2, "w0-1")
    begun(store)
    job(monkeypatch, 1, "w1-0")
    with pytest.raises(everstep.Fenced, match="round 1 is older than round 2") as raised:
        begun(store, events)
    assert [f["error"] for f in events.of("fenced")] == [raised.value]


def opened_rounds(store: ObjectStore) -> list[int]:
    log = CommitLog(store)
    records = [log.read(n) for n in range(log.head().last + 1)]
    return [r.round for r in records if isinstance(r, OpenRecord)]


@pytest.mark.parametrize("told", ["", "0", "3", "9"], ids=["before its rounds", "0", "older", "newer"])
def test_world_that_was_moved_to_claims_its_round_whatever_its_process_was_started_in(
    monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    store = MemoryStore()
    monkeypatch.setenv(env.ROUND, told)
    monkeypatch.setenv(env.JOB_UID, "uid-1")
    checkpointer = everstep.Checkpointer(store=store)
    InSession(checkpointer).move(Alone(), 5)
    checkpointer.restore(state())
    InSession(checkpointer).move(Alone(), 7)
    checkpointer.save(1, state(1.0)).wait(30)
    assert opened_rounds(store) == [5, 7]
    checkpointer.close()


def test_process_that_slept_since_an_older_round_never_takes_the_log_of_a_newer_one(events: Any) -> None:
    """Outside of Kubernetes, where nothing but the rendezvous orders worlds."""
    store = MemoryStore()
    sleeper = begun(store, events)
    InSession(sleeper).move(Alone(), 2, "agent-a")
    newer = everstep.Checkpointer(store=store)
    InSession(newer).move(Alone(), 3, "agent-a")
    newer.save(5, state(5.0)).wait(30)
    with pytest.raises(everstep.Fenced, match="round 2 is older than round 3"):
        sleeper.save(4, state(4.0))
    newer.save(6, state(6.0)).wait(30)
    newer.close()
    assert value_in(store) == (6, {6.0})


@pytest.mark.long_but("local")
def test_commits_beyond_keep_are_deleted_and_the_kept_ones_are_whole(url: str) -> None:
    store = plain_store(url)
    for first in (1, 4):
        with everstep.Checkpointer(url, keep=2) as checkpointer:
            checkpointer.restore(state())
            for step in range(first, first + 3):
                checkpointer.save(step, state(float(step))).wait(60)
    assert len({i.name.split("/")[1] for i in store.list("data/")}) == 2
    assert len(store.list("log/")) == 8
    newest = next(i.name for i in reversed(store.list("data/")))
    store.delete(newest)
    assert value_in(store) == (5, {5.0})


def test_save_that_lacks_a_key_of_the_restored_state_is_refused_before_it_takes_the_place_of_a_whole_one(
    url: str,
) -> None:
    with everstep.Checkpointer(url) as checkpointer:
        checkpointer.restore({**state(), "optimizer": {"rate": 0.1}})
        with pytest.raises(StateMismatch, match=r"lacks 'optimizer'.*another URL"):
            checkpointer.save(1, state())
        checkpointer.save(1, {**state(), "optimizer": {"rate": 0.1}, "epoch": 1}).wait(60)
        with pytest.raises(StateMismatch, match="lacks 'epoch'"):
            checkpointer.save(2, {**state(), "optimizer": {"rate": 0.1}})
        found = checkpointer.latest()
    assert found is not None
    assert found.step == 1


@pytest.mark.long_but("local")
def test_key_that_comes_into_the_state_behind_the_restore_that_left_it_out_is_not_saved(url: str) -> None:
    """The optimizer of a script that makes it after the restore begins anew at each start, and was saved as trained."""
    with everstep.Checkpointer(url) as first:
        first.restore({**state(), "optimizer": {"rate": 0.1}})
        first.save(1, {**state(), "optimizer": {"rate": 0.1}}).wait(60)
    with everstep.Checkpointer(url) as late:
        late.restore(state())
        with pytest.raises(StateMismatch, match=r"'optimizer' came into the state after restore\(\).*exclude=\["):
            late.save(2, {**state(), "optimizer": {"rate": 0.3}})
        late.restore({"optimizer": (optimizer := {"rate": 0.3})})  # the other part of the same commit
        assert optimizer == {"rate": 0.1}
        late.save(2, {**state(), "optimizer": optimizer}).wait(60)
    with everstep.Checkpointer(url) as anew:
        anew.restore(state(), exclude=["optimizer"])
        anew.save(3, {**state(), "optimizer": {"rate": 0.3}}).wait(60)


def test_saves_that_are_left_out_are_told_of_once_a_save(caplog: pytest.LogCaptureFixture) -> None:
    store = Gate()
    checkpointer = begun(store, every_steps=1)
    checkpointer.save(1, state(1.0))
    with caplog.at_level(logging.WARNING, "everstep.checkpoint"):
        assert not any(checkpointer.should_save(step) for step in range(2, 9))
    assert [r.getMessage() for r in caplog.records if "should_save(2) says no" in r.getMessage()] == caplog.messages
    assert len(caplog.messages) == 1
    store.gate.set()
    checkpointer.close()


def test_save_by_time_that_a_slow_store_delays_is_made_later_and_reported_once(events: Any) -> None:
    store = Gate()
    checkpointer = begun(store, events, every_seconds=1e-6)
    checkpointer.save(1, state(1.0))
    assert not any(checkpointer.should_save(step) for step in range(2, 9))
    assert [fields["step"] for fields in events.of("save-skipped")] == [2]
    store.gate.set()
    assert checkpointer.wait(30)
    assert checkpointer.should_save(9)
    checkpointer.close()


def test_store_that_is_away_at_the_first_saves_in_another_world_costs_these_and_not_the_training(events: Any) -> None:
    store = Away(MemoryStore())
    checkpointer = begun(store, events, every_steps=1)
    checkpointer.save(1, state(1.0)).wait(30)
    checkpointer.wait()
    InSession(checkpointer).move(Alone(), 2)
    store.away = True
    assert not checkpointer.should_save(2)
    with pytest.raises(SaveFailed, match="step 3 was not saved: away"):
        checkpointer.save(3, state(3.0)).wait(30)
    assert [fields["step"] for fields in events.of("save-failed")] == [2, 3]
    store.away = False
    assert checkpointer.should_save(4)
    checkpointer.save(4, state(4.0)).wait(30)
    checkpointer.close()
    assert value_in(store) == (4, {4.0})


def test_save_is_made_though_notes_wait_for_a_slow_store() -> None:
    checkpointer, waits, goes_on = begun(MemoryStore()), threading.Event(), threading.Event()
    writer = checkpointer._writer
    assert writer is not None
    notes = [threading.Event() for _ in range(50)]
    writer.later(lambda: (waits.set(), goes_on.wait(30)))
    assert waits.wait(30)
    for note in notes:
        writer._note(note.set)
    handle = checkpointer.save(1, state(1.0))
    goes_on.set()
    assert isinstance(handle.wait(30), Committed)
    checkpointer.close()
    assert 0 < sum(note.is_set() for note in notes) < len(notes), "of the notes there is a bound"


def test_shards_of_a_commit_whose_outcome_was_never_learnt_are_kept(events: Any) -> None:
    inner = MemoryStore()
    counted = FaultStore(inner)
    checkpointer = begun(counted, events)
    checkpointer.save(1, state(1.0)).wait(30)
    checkpointer.wait()
    checkpointer.close()
    faulty = FaultStore(inner)
    checkpointer = begun(faulty, events)
    # After the four calls of the clean-up before a first save. Of the save's own (put of the shard, look at the open
    # record, create of the record) the third succeeds without an answer.
    faulty._faults = {len(faulty.calls) + 6: LoseResponse()}
    with pytest.raises(SaveFailed, match="lost"):
        checkpointer.save(2, state(2.0)).wait(30)
    assert faulty.calls[-1].startswith("create log/")
    checkpointer.save(3, state(3.0)).wait(30)
    checkpointer.close()
    shards = sorted(n for n in inner.objects if n.startswith("data/"))
    assert len(shards) == 3
    del inner.objects[shards[-1]]
    assert value_in(inner) == (2, {2.0})


def test_job_created_later_keeps_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    job(monkeypatch, 1, "b-w0-0", uid="uid-b")
    monkeypatch.setenv(env.JOB_CREATED, "200")
    begun(store)
    job(monkeypatch, 5, "a-w0-0", uid="uid-a")
    monkeypatch.setenv(env.JOB_CREATED, "100")
    with pytest.raises(everstep.Fenced, match="older than job uid-b"):
        begun(store)


def test_clean_up_that_fails_does_not_fail_the_save(events: Any) -> None:
    class NoDelete(MemoryStore):
        def delete(self, name: str) -> None:
            raise StoreUnusable("403: deleting is not allowed")

    store = NoDelete()
    with begun(store, events, keep=1) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(float(step))).wait(30)
            checkpointer.wait()
    assert [f["step"] for f in events.of("committed")] == [1, 2, 3]
    assert events.of("save-failed") == []


def test_newer_format_in_the_log_is_an_error_that_says_so() -> None:
    import xxhash  # noqa: PLC0415

    store = MemoryStore()
    line = json.dumps({"version": 2, "n": 0}).encode()
    store.create(
        "log/000000000000.json", line + b'\n{"xxh3_128":"' + xxhash.xxh3_128_hexdigest(line).encode() + b'"}\n'
    )
    with pytest.raises(UnsupportedVersion, match="newer everstep"):
        begun(store)


def test_missing_bucket_fails_before_the_first_step_with_its_exit_code(s3_url: str) -> None:
    # Case 80, first half.
    started = time.monotonic()
    with pytest.raises(everstep.StoreUnusable, match="bucket") as raised:
        everstep.Checkpointer("s3://everstep-no-such-bucket/run").restore(state())
    assert raised.value.exit_code == 85
    assert time.monotonic() - started < RetryPolicy().outage - 15, "nobody waited for the bucket to come"


@pytest.mark.long
def test_wrong_keys_fail_before_the_first_step(s3_url: str) -> None:
    with pytest.raises(everstep.StoreUnusable):
        everstep.Checkpointer(s3_url, storage_options={"key": "wrong", "secret": "wrong"}).restore(state())


@pytest.mark.parametrize(
    ("options", "variables", "text"),
    [
        ({}, {}, "EVERSTEP_CHECKPOINT_URL"),
        ({"url": "/tmp/x", "keep": 0}, {}, "keep=0"),
        ({"url": b"/tmp/x"}, {}, "url=b'/tmp/x'"),
        ({"url": "/tmp/x", "keep": "2"}, {}, "keep='2'"),
        ({"url": "/tmp/x", "peer_timeout": 0}, {}, "peer_timeout=0"),
        ({"url": "/tmp/x", "every_steps": -1}, {}, "every_steps=-1"),
        ({"url": "/tmp/x"}, {env.CHECKPOINT_EVERY_SECONDS: "soon"}, "EVERSTEP_CHECKPOINT_EVERY_SECONDS='soon'"),
    ],
)
def test_setting_that_is_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], variables: dict[str, str], text: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((CheckpointError, StoreUnusable), match=text):
        everstep.Checkpointer(**options)


def test_settings_of_the_operator_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(env.CHECKPOINT_URL, str(tmp_path))
    monkeypatch.setenv(env.CHECKPOINT_EVERY_STEPS, "5")
    monkeypatch.setenv(env.CHECKPOINT_KEEP, "1")
    with everstep.Checkpointer() as checkpointer:
        checkpointer.restore(state())
        due = []
        for step in range(1, 11):
            if checkpointer.should_save(step):
                due.append(step)
                checkpointer.save(step, state(float(step))).wait(30)
    assert due == [5, 10]
    assert len(plain_store(str(tmp_path)).list("data/")) == 1


def test_save_is_due_when_the_seconds_have_passed_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr("everstep.checkpoint.checkpointer.time", clock)
    checkpointer = begun(MemoryStore(), every_seconds=20)
    due = []
    for step in range(1, 11):  # at 5, 10, … seconds after the restore
        now[0] += 5
        if checkpointer.should_save(step):
            due.append(step)
            checkpointer.save(step, state(1.0)).wait(30)
    assert due == [4, 8]


def test_hook_that_raises_does_not_fail_the_save() -> None:
    def hook(kind: str, **fields: Any) -> None:
        raise RuntimeError(kind)

    assert isinstance(begun(MemoryStore(), hook).save(1, state(1.0)).wait(30), Committed)


def test_slow_store_blocks_training_only_for_the_copy() -> None:
    store = MemoryStore()
    slow = Stuck(store)
    checkpointer = begun(slow)
    slow.stuck.set()
    handle = checkpointer.save(1, state(1.0))
    assert not handle.done(), "it waited for the store"
    slow.goes_on.set()
    assert isinstance(handle.wait(30), Committed)
    assert value_in(store) == (1, {1.0})


@pytest.mark.long
def test_s3_server_that_restarts_during_a_save_delays_it_and_loses_nothing(
    s3_url: str, s3_server: Any, events: Any
) -> None:
    with everstep.Checkpointer(s3_url, on_event=events) as checkpointer:
        checkpointer.restore(state())
        checkpointer.save(1, state(1.0)).wait(60)
        s3_server.kill()
        try:
            handle = checkpointer.save(2, state(2.0))
            assert not handle.done(), "training waited for a dead store"
            with pytest.raises(TimeoutError):
                handle.wait(1.5)
        finally:
            s3_server.start()
        assert isinstance(handle.wait(60), Committed)
    assert events.of("save-failed") == []
    assert value_in(plain_store(s3_url)) == (2, {2.0})


def test_s3_server_that_stays_away_costs_the_save_and_nothing_else(s3_url: str, s3_server: Any, events: Any) -> None:
    store = RetryingStore(plain_store(s3_url), RetryPolicy(first=0.05, most=0.2, outage=1.0))
    checkpointer = begun(store, events)
    checkpointer.save(1, state(1.0)).wait(60)
    s3_server.kill()
    try:
        with pytest.raises(SaveFailed, match="gave up after"):
            checkpointer.save(2, state(2.0)).wait(60)
    finally:
        s3_server.start()
    assert [f["step"] for f in events.of("save-failed")] == [2]
    checkpointer.save(3, state(3.0)).wait(60)
    assert value_in(store) == (3, {3.0})


def test_restore_from_a_store_that_is_away_is_retryable_and_not_unusable() -> None:
    with pytest.raises(RetryableError):
        begun(FaultStore(MemoryStore(), {0: Fail(RetryableError("503"))}))


def test_closed_checkpointer_says_so() -> None:
    checkpointer = begun(MemoryStore())
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(CheckpointError, match="closed"):
        checkpointer.save(1, state())


def test_world_of_several_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CheckpointError, match="init_process_group"):
        begun(MemoryStore())
    with pytest.raises(CheckpointError, match="rank=1 was passed"):
        begun(MemoryStore(), world_size=1, rank=1)


@pytest.mark.parametrize(("text", "meant"), [("1", True), ("True", True), ("0", False), ("", False), ("yes", None)])
def test_variable_for_a_single_committer_is_yes_or_no_and_nothing_else(text: str, meant: bool | None) -> None:
    def resolved() -> bool:
        environ = {"EVERSTEP_SINGLE_COMMITTER": text, "EVERSTEP_CHECKPOINT_URL": "memory://x"}
        return Settings.resolve(environ, None, None, None, None, None, None, None).single_committer

    if meant is None:
        with pytest.raises(CheckpointError, match="EVERSTEP_SINGLE_COMMITTER=yes: 1 or 0 is expected"):
            resolved()
    else:
        assert resolved() is meant


def test_store_without_conditional_create_needs_single_committer() -> None:
    # fsspec's generic mode="create" looks first and writes then, so the probe alone would not find it out.
    class LooksFirst(MemoryFileSystem):
        protocol = "looks-first"
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

    fsspec.register_implementation("looks-first", LooksFirst, clobber=True)
    with pytest.raises(StoreUnusable, match="single_committer"):
        everstep.Checkpointer("looks-first://bucket/run")
    with everstep.Checkpointer("looks-first://bucket/run", single_committer=True) as checkpointer:
        checkpointer.restore(state())
        checkpointer.save(1, state(1.0)).wait(30)
        assert checkpointer.verify() == ()
    assert value_in(plain_store("looks-first://bucket/run", single_committer=True)) == (1, {1.0})


def processor_seconds(*codes: str) -> list[float]:
    """Of a bare interpreter that runs each: the least of five runs, taken in turns."""

    def used() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    least = [math.inf] * len(codes)
    for _ in range(5):
        for number, code in enumerate(codes):
            before = used()
            subprocess.run([sys.executable, "-I", "-c", code], check=True)
            least[number] = min(least[number], used() - before)
    return least


def test_import_is_cheap_and_brings_no_torch() -> None:
    code = (
        "import sys, everstep, everstep.checkpoint.log.decisions, everstep.checkpoint.retention.catalog;"
        "import everstep.contract.env;"
        "print([m for m in ('torch', 'numpy', 'fsspec', 's3fs', 'safetensors') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"
    # Thirty milliseconds are about two starts of an interpreter; the figure itself depends on the machine.
    with_us, without = processor_seconds("import everstep", "pass")
    assert with_us < 3 * without


def test_forked_child_uses_the_store_with_a_connection_of_its_own(s3_url: str, in_child: Any) -> None:
    store = plain_store(s3_url)
    store.put("a", b"parent")

    def body() -> None:
        assert store.get("a") == b"parent"
        store.put("b", str(os.getpid()).encode())

    assert in_child(body, timeout=30) == 0
    assert store.get("b") != str(os.getpid()).encode()


def test_folder_may_be_given_as_a_path(tmp_path: Path) -> None:
    with everstep.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.restore(state())
        checkpointer.save(1, state()).wait(30)
    assert everstep.load(tmp_path / "run").step == 1
