"""What stays beyond the newest commits: decided by rules, written as marks, and deleted by nobody's clean-up."""

import itertools
import logging
import math
import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import everstep
from everstep.checkpoint import CheckpointError, Keep, NoCommit
from everstep.checkpoint.format.layout import KEPT, hold_name, owner_of, save_id, shard_name, tag_of
from everstep.checkpoint.format.manifest import CommitRecord, Shard
from everstep.checkpoint.keep import Kept, numbers, plan_marks
from everstep.checkpoint.retention import pins
from everstep.checkpoint.retention.catalog import Catalog
from everstep.checkpoint.retention.cleaner import kept_of, plan_retention
from everstep.storage import MemoryStore, StoreUnusable
from everstep.storage.faults import Fail, FaultStore

WRITER = "0123456789abcdef"
HOUR = 3600


def commit(n: int, step: int, at: float = 0.0, **metrics: float) -> CommitRecord:
    identifier = save_id(0, WRITER, n)
    shard = Shard(shard_name(identifier, 0), 8, 64, ("0" * 32,))
    stamp = f"2026-11-21T{int(at) // HOUR:02d}:{int(at) % HOUR // 60:02d}:00Z"
    return CommitRecord(n, WRITER, 0, "", step, identifier, 1, stamp, 0, -1, (shard,), (), {"metrics": {**metrics}})


class Log:
    """A log whose writer cleans up after each commit, by the pure functions alone."""

    def __init__(self, keep: Keep) -> None:
        self.keep = keep
        self.commits: list[CommitRecord] = []  # newest first
        self.marks: dict[str, Kept] = {}
        self.data = set[str]()
        self.pinned = set[str]()
        self.damaged = set[int]()

    def add(self, step: int, at: float = 0.0, *, cleans: bool = True, **metrics: float) -> CommitRecord:
        record = commit(len(self.commits), step, at, **metrics)
        self.commits.insert(0, record)
        self.data.add(record.save_id)
        if cleans:
            self.clean()
        return record

    def clean(self) -> None:
        usable = [kept_of(r) for r in self.commits if r.save_id in self.data and r.n not in self.damaged]
        for mark in plan_marks(self.keep, self.marks.values(), usable):
            self.marks[mark.save_id] = mark
            if not mark.why:
                del self.marks[mark.save_id]
        plan = plan_retention(
            self.data, self.commits, keep=self.keep.last, damaged=frozenset(self.damaged), open_n=0,
            sequence=self.commits[0].n, pinned=frozenset(self.pinned | set(self.marks)),
        )  # fmt: skip
        self.data -= {d.save_id for d in plan}

    @property
    def steps(self) -> list[int]:
        return [r.step for r in reversed(self.commits) if r.save_id in self.data]


def metrics_of(record: Any) -> Any:
    return record.values["metrics"]


def kept(keep: Keep, commits: Iterable[tuple[int, float, dict[str, float]]]) -> list[int]:
    log = Log(keep)
    for step, at, metrics in commits:
        log.add(step, at, **metrics)  # type: ignore[arg-type]
    return log.steps


def test_first_commit_of_each_interval_of_steps_stays_for_good() -> None:
    assert kept(Keep(2, every_steps=100), ((s, 0, {}) for s in range(20, 400, 20))) == [100, 200, 300, 360, 380]


def test_saves_that_miss_the_multiples_are_kept_where_they_come_next() -> None:
    # Saves by the clock come at any step: by the multiples alone none of these would stay.
    steps = [37, 81, 119, 163, 207, 251, 299, 341]
    assert kept(Keep(1, every_steps=100), ((s, 0, {}) for s in steps)) == [119, 207, 341]


def test_commit_an_hour_after_the_one_that_was_kept_stays_for_good() -> None:
    commits = [(i, i * HOUR / 4, {}) for i in range(1, 12)]
    assert kept(Keep(1, every_hours=1), commits) == [1, 5, 9, 11]


def test_commit_whose_clock_ran_ahead_does_not_end_the_keeping_by_hours() -> None:
    times = [0, 24, 9000, 25, 100, 500]
    commits = [Kept(str(i), i, i * 10 + 1, hours * HOUR) for i, hours in enumerate(times)]
    assert [m.at / HOUR for m in plan_marks(Keep(every_hours=6), [], commits)] == [0, 24, 9000, 100, 500]


@given(st.lists(st.integers(-40, 40), min_size=1, max_size=30), st.integers(1, 12))
def test_commits_are_kept_by_hours_whatever_the_clock_does(jumps: list[int], every: int) -> None:
    marks: dict[str, Kept] = {}
    at = 1000
    for i, jump in enumerate(jumps):
        at += jump
        commit = Kept(str(i), i, i + 1, at * HOUR)
        before = [m.at / HOUR for m in marks.values()]
        marks |= {m.save_id: m for m in plan_marks(Keep(every_hours=every), marks.values(), [commit])}
        close = any(0 <= at - earlier < every for earlier in before)
        assert (commit.save_id in marks) != close, "kept unless one from less than so many hours before it is"


@pytest.mark.parametrize(("mode", "best"), [("min", [3, 5]), ("max", [2, 6])])
def test_best_commits_by_a_metric_stay_until_better_ones_come(mode: Any, best: list[int]) -> None:
    losses = [5.0, 9.0, 1.0, math.nan, 2.0, 8.0, 4.0]
    log = Log(Keep(1, best=2, metric="loss", mode=mode))
    for step, loss in enumerate(losses, 1):
        log.add(step, loss=loss)
    log.add(8)  # has no loss
    assert log.steps == [*best, 8]


def test_of_equal_ones_the_newer_is_better() -> None:
    log = Log(Keep(1, best=1))
    for step in (1, 2, 3):
        log.add(step, loss=1.0)
    log.add(4, loss=2.0)
    assert log.steps == [3, 4]


def test_interval_is_kept_anew_after_going_back_behind_it() -> None:
    log = Log(Keep(1, every_steps=100))
    for step in (90, 105, 150, 40, 103, 160):  # restored step 40 after 150: what follows is another run of the interval
        log.add(step)
    assert log.steps == [105, 103, 160], "the abandoned one was kept for good, and the new run has its own"


def test_commit_that_its_writer_died_before_marking_is_marked_by_the_next_one() -> None:
    log = Log(Keep(1, every_steps=10))
    log.add(5)
    log.add(10, cleans=False)
    log.add(11)
    assert log.steps == [10, 11]


def test_rules_that_are_dropped_let_nothing_go_that_was_kept_for_good() -> None:
    log = Log(Keep(1, every_steps=10, best=1))
    for step in (10, 15, 20, 25):
        log.add(step, loss=float(step))
    log.keep = Keep(1, every_hours=1000)
    log.add(26)
    assert log.steps[:2] == [10, 20]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"last": 0}, "last=0"), ({"last": True}, "last=True"), ({"every_steps": 0}, "every_steps=0"),
        ({"every_steps": 1.5}, "every_steps=1.5"), ({"every_hours": 0}, "every_hours=0"),
        ({"every_hours": math.nan}, "every_hours=nan"), ({"best": -1}, "best=-1"), ({"metric": ""}, "metric=''"),
        ({"mode": "least"}, "mode='least'"), ({"last": 10**6}, "at most 10000"),
    ],
)  # fmt: skip
def test_rule_that_is_none_is_named(given: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        Keep(**given)


EVENTS = st.lists(
    st.tuples(
        st.integers(-3, 40),  # how far the step goes, or by how much the run has gone back
        st.integers(0, 90),  # minutes since the commit before
        st.one_of(st.none(), st.floats(0, 9)),
        st.sampled_from(["", "", "", "pin", "damage", "dies"]),
    ),
    min_size=1, max_size=25,
)  # fmt: skip


@given(
    st.builds(Keep, last=st.integers(1, 3), every_steps=st.one_of(st.none(), st.integers(1, 60)),
              every_hours=st.one_of(st.none(), st.integers(1, 3)), best=st.integers(0, 3),
              mode=st.sampled_from(["min", "max"])),
    EVENTS,
)  # fmt: skip
def test_newest_and_pinned_and_kept_commits_are_never_deleted(keep: Keep, events: list[Any]) -> None:
    log, step, at = Log(keep), 0, 0.0
    good = set[str]()  # ever marked for good
    for delta, minutes, loss, what in events:
        step, at = max(0, step + delta if delta > 0 else step // 2), min(at + minutes * 60, 23 * HOUR)
        metrics = {} if loss is None else {"loss": loss}
        record = log.add(step, at, cleans=False, **metrics)
        if what == "pin":
            log.pinned.add(record.save_id)
        elif what == "damage":
            log.damaged.add(record.n)
        if what != "dies":
            log.clean()
        good |= {m.save_id for m in log.marks.values() if {"steps", "hours"} & set(m.why)}
        usable = [r for r in log.commits if r.n not in log.damaged]
        assert {r.save_id for r in usable[: keep.last]} <= log.data
        assert log.pinned <= log.data
        assert good <= log.data
        assert set(log.marks) <= log.data
    log.clean()
    # By force: the best of all usable commits that there ever were are there, as none of them could go before.
    seen = sorted(
        (r for r in log.commits if r.n not in log.damaged and metrics_of(r)),
        key=lambda r: (metrics_of(r)["loss"] * (1 if keep.mode == "min" else -1), -r.n),
    )
    if not log.damaged:
        assert {r.save_id for r in seen[: keep.best]} <= log.data
    if keep.every_steps and len({r.step for r in log.commits}) == len(log.commits) and _grows(log.commits):
        for number in range(1, step // keep.every_steps + 1):
            inside = [r for r in reversed(log.commits) if r.step // keep.every_steps == number]
            if inside and not log.damaged:
                assert inside[0].save_id in log.data


def _grows(commits: list[CommitRecord]) -> bool:
    steps = [r.step for r in reversed(commits)]
    return steps == sorted(steps)


# With a store.


def steps_of(store: Any) -> list[int]:
    return [found.step for found in Catalog(store).list()]


def train(runs: Any, store: Any, losses: dict[int, float], **options: Any) -> None:
    run, _ = runs(store).begin(**options)
    for step, loss in losses.items():
        run.save(step, runs.state(step), metrics={"loss": torch.tensor(loss)}).wait(30)
        runs.settle(run)
    run.close()


def test_run_keeps_what_its_rules_say_over_restarts_and_other_clean_ups(runs: Any) -> None:
    store = MemoryStore()
    rules = {"keep": Keep(1, every_steps=10, best=1)}
    train(runs, store, {5: 0.5, 8: 3.0, 10: 4.0, 12: 5.0}, **rules)
    assert steps_of(store) == [12, 10, 5]
    train(runs, store, {20: 2.0, 23: 0.25}, **rules)
    assert steps_of(store) == [23, 20, 10]
    train(runs, store, {31: 9.0}, keep=1)  # a run without rules
    Catalog(store).gc(1)
    assert steps_of(store) == [31, 23, 20, 10]
    found = {f.step: f for f in Catalog(store).list()}
    assert [found[s].kept for s in (31, 23, 20, 10)] == [False, True, True, True]
    assert dict(found[23].metrics) == {"loss": 0.25}
    assert Catalog(store).verify(10) == ()
    assert runs(store).restored() == 31
    Catalog(store).unpin(10)
    Catalog(store).gc(1)
    assert steps_of(store) == [31, 23, 20]


def test_kept_commit_older_than_a_long_log_is_listed_and_found(runs: Any) -> None:
    store = FaultStore(MemoryStore())
    runs(store).save(*range(10, 60), keep=Keep(1, every_steps=40))
    before = len(store.calls)
    assert steps_of(store) == [59, 40]
    reads = [c for c in store.calls[before:] if c.startswith("get log/")]
    assert len(reads) < 10, "the log between them is not walked"
    assert Catalog(store).find(40).step == 40


def test_run_that_keeps_more_than_the_one_before_it_misses_no_commit_that_was_deleted(runs: Any, caplog: Any) -> None:
    store = FaultStore(MemoryStore())
    runs(store).save(*range(40), keep=1)
    before = len(store.calls)
    with caplog.at_level(logging.WARNING):
        runs(store).save(*range(40, 45), keep=30)
    assert [r.message for r in caplog.records] == []
    assert steps_of(store) == [44, 43, 42, 41, 40, 39]
    calls = [c for c in store.calls[before:] if c.startswith(("get log/", "size data/"))]
    assert len(calls) < 60, "the deleted commits are walked, or asked for, at each save"


def test_shard_that_vanishes_from_a_commit_that_is_kept_is_told_once(runs: Any, caplog: Any) -> None:
    store = MemoryStore()
    run, _ = runs(store).begin(keep=3)
    for step in range(6):
        run.save(step, runs.state(step)).wait(30)
        runs.settle(run)
        if step == 2:
            (lost,) = [f for f in Catalog(store).list() if f.step == 1]
            store.delete(shard_name(lost.save_id, 0))
    run.close()
    told = [r for r in caplog.records if "lost shards" in r.message]
    assert len(told) == 1
    assert steps_of(store)[:3] == [5, 4, 3]


def test_commits_of_writers_that_died_in_a_row_before_their_clean_ups_are_kept(runs: Any) -> None:
    store = MemoryStore()
    rules = {"keep": Keep(1, every_steps=10)}
    runs(store).save(5, **rules)
    for step in (10, 20, 30):
        run, _ = runs(store).begin(**rules)
        run._writer._cleaner.clean = lambda: None  # dies right after the commit
        run.save(step, runs.state(step)).wait(30)
        del run
    runs(store).save(31, 32, **rules)
    assert steps_of(store) == [32, 30, 20, 10]


def test_clean_up_that_dies_at_any_call_loses_no_commit_that_is_to_stay(runs: Any) -> None:
    rules = {"keep": Keep(1, every_steps=10, best=1)}
    begun = MemoryStore()
    train(runs, begun, {5: 1.0, 8: 3.0}, **rules)
    for at in itertools.count():
        inner = MemoryStore()
        inner.objects = dict(begun.objects)
        store = FaultStore(inner)
        run, _ = runs(store).begin(**rules)
        cleaner = run._writer._cleaner
        run.save(10, runs.state(10), metrics={"loss": 2.0}).wait(30)  # with its clean-up; the next one dies
        runs.settle(run)
        real, over = cleaner.clean, threading.Event()

        def dying(real: Any = real, store: Any = store, at: int = at, over: Any = over) -> None:
            first = len(store.calls)
            store._faults = {
                n: Fail(StoreUnusable("the writer dies here")) for n in range(first + at, first + at + 500)
            }
            real()
            if len(store.calls) < first + at:
                over.set()  # all of its calls were done before

        cleaner.clean = dying
        run.save(20, runs.state(20), metrics={"loss": 0.5}).wait(30)
        runs.settle(run)
        train(runs, inner, {21: 9.0, 22: 9.0}, **rules)
        assert steps_of(inner) == [22, 20, 10], at
        assert Catalog(inner).verify(10) == Catalog(inner).verify(20) == ()
        if over.is_set():
            break
    assert at > 8


def test_mark_gives_way_to_a_deletion_that_has_begun(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2)
    record = Catalog(store).find(1)
    faulty = FaultStore(store, {2: Fail(StoreUnusable("the cleaner dies here"))})
    with pytest.raises(StoreUnusable):
        pins.delete_save(faulty, record.save_id, [s.path for s in record.shards])
    mark = Kept(record.save_id, record.n, 1, 0.0, {}, ("steps",))
    assert not pins.mark_kept(store, mark)
    assert pins.held_saves(store) == frozenset()


@pytest.mark.parametrize("what", [KEPT, tag_of("good")])
def test_deletion_gives_way_to_a_mark_and_to_a_tag(runs: Any, what: str) -> None:
    store = MemoryStore()
    runs(store).save(1, 2)
    record = Catalog(store).find(1)
    store.put(hold_name(record.save_id, what, WRITER), b"{}")
    assert not pins.delete_save(store, record.save_id, [s.path for s in record.shards])
    assert Catalog(store).verify(1) == ()


def test_mark_that_is_damaged_holds_its_commit_all_the_same(runs: Any) -> None:
    store = MemoryStore()
    rules = {"keep": Keep(1, every_steps=10)}
    runs(store).save(10, **rules)
    (name,) = pins.holds(store).names(Catalog(store).find(10).save_id, KEPT)
    store.put(name, b"not a mark")
    runs(store).save(11, 12, **rules)
    assert steps_of(store)[0] == 12
    assert Catalog(store).verify(n=1) == ()


def test_tag_names_a_commit_keeps_it_and_can_be_moved(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2, 3)
    look = everstep.Checkpointer(store=store)
    assert look.tag("best-eval", 1).tags == ("best-eval",)
    assert look.tag("best-eval", 2).step == 2
    look.tag("v1.0", 2)
    assert look.tagged("best-eval").step == 2
    Catalog(store).gc(1)
    assert [(f.step, f.tags) for f in look.list()] == [(3, ()), (2, ("best-eval", "v1.0"))]
    look.untag("best-eval")
    Catalog(store).gc(1)
    assert steps_of(store) == [3, 2], "the other tag holds it"
    look.untag("v1.0")
    Catalog(store).gc(1)
    assert steps_of(store) == [3]


def test_tag_that_cannot_be_is_refused_by_name(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1)
    look = everstep.Checkpointer(store=store)
    for name in ("", "a/b", "../x", "x" * 65, ".hidden"):
        with pytest.raises(CheckpointError, match="tag"):
            look.tag(name, 1)
    with pytest.raises(NoCommit, match="no commit is tagged 'x'; there are no tags"):
        look.tagged("x")
    look.tag("good", 1)
    with pytest.raises(NoCommit, match="no commit is tagged 'x'; there are good"):
        look.untag("x")


def test_tag_that_was_not_moved_whole_is_told(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2)
    Catalog(store).tag("good", 1)
    two = Catalog(store).find(2)
    pins._hold(store, two, tag_of("good"), pins._body(two, "now"), [], lambda _: None, time.time)
    with pytest.raises(CheckpointError, match="tag 'good' is on steps 2 and 1"):
        Catalog(store).tagged("good")
    Catalog(store).tag("good", 2)
    assert Catalog(store).tagged("good").step == 2


@pytest.mark.parametrize("bad", [{"loss": "low"}, {"loss": torch.zeros(2)}, {"": 1.0}, {"loss": None}])
def test_metric_that_is_no_number_is_refused_before_anything_is_saved(runs: Any, bad: dict[str, Any]) -> None:
    store = MemoryStore()
    run, _ = runs(store).begin()
    with pytest.raises(CheckpointError, match="metrics"):
        run.save(1, runs.state(1), metrics=bad)
    run.save(1, runs.state(1), metrics={"loss": math.nan, "accuracy": 1}).wait(30)
    assert dict(Catalog(store).list()[0].metrics) == {"accuracy": 1.0}
    assert owner_of(Catalog(store).list()[0].save_id) is not None


def test_settings_of_the_operator_are_used(monkeypatch: pytest.MonkeyPatch, runs: Any) -> None:
    monkeypatch.setenv("EVERSTEP_CHECKPOINT_KEEP", "1")
    monkeypatch.setenv("EVERSTEP_CHECKPOINT_KEEP_EVERY_STEPS", "10")
    store = MemoryStore()
    runs(store).save(9, 10, 11, 12)
    assert steps_of(store) == [12, 10]
    monkeypatch.setenv("EVERSTEP_CHECKPOINT_KEEP_EVERY_STEPS", "0")
    with pytest.raises(CheckpointError, match="every_steps=0"):
        everstep.Checkpointer(store=store)
    monkeypatch.setenv("EVERSTEP_CHECKPOINT_KEEP_EVERY_STEPS", "1.5")
    with pytest.raises(CheckpointError, match=r"EVERSTEP_CHECKPOINT_KEEP_EVERY_STEPS=1\.5"):
        everstep.Checkpointer(store=store)


def test_metrics_that_are_no_numbers_are_named_and_those_that_no_record_holds_left_out() -> None:
    for metrics, words in (
        ([1], r"metrics=\[1\]: a dict"),
        ({1: 2.0}, "the name 1"),
        ({"a": "x"}, r"metrics\['a'\]='x'"),
    ):
        with pytest.raises(CheckpointError, match=words):
            numbers(metrics)  # type: ignore[arg-type]
    assert numbers({"large": 10**400, "nan": float("nan"), "loss": 2}) == {"loss": 2.0}


def test_metric_that_is_known_after_the_save_counts_also_where_the_commit_was_marked_before(runs: Any) -> None:
    store = MemoryStore()
    run, _ = runs(store).begin(keep=Keep(1, every_steps=10, best=1))
    for step, loss in ((3, 4.0), (10, 1.0), (11, 3.0), (12, 5.0), (13, 2.0)):
        run.save(step, runs.state(step), metrics={"other": 0.5})
        run.add_metrics(step, {"loss": torch.tensor(9.0)})
        run.add_metrics(step, {"loss": torch.tensor(loss)})
        run.wait()
        runs.settle(run)
    with pytest.raises(CheckpointError, match=r"add_metrics\(14\): no save of this step.*steps 3, 10, 11, 12, 13"):
        run.add_metrics(14, {"loss": 1.0})
    run.close()
    found = {f.step: (dict(f.metrics), f.kept) for f in Catalog(store).list()}
    assert found == {13: ({"other": 0.5, "loss": 2.0}, False), 10: ({"other": 0.5, "loss": 1.0}, True)}
    train(runs, store, {20: 0.5, 25: 8.0}, keep=Keep(1, best=1))
    assert steps_of(store) == [25, 20, 10], "10 stays for its interval"


def test_metric_of_a_save_that_came_to_nothing_is_put_nowhere() -> None:
    store, diverged = MemoryStore(), {"model": torch.nn.Linear(1, 1)}
    run = everstep.Checkpointer(store=store, nonfinite="refuse")
    run.restore(diverged)
    with torch.no_grad():
        diverged["model"].weight.fill_(math.nan)
    run.save(1, diverged)
    run.add_metrics(1, {"loss": 1.0})
    with pytest.raises(CheckpointError, match="NaN"):
        run.close()
    assert not [info.name for info in store.list("data/") if "metrics" in info.name]


def test_metric_after_going_back_belongs_to_the_commit_that_was_loaded(runs: Any) -> None:
    # Of two commits of one step: the run has gone back behind the first one, and then to it.
    store = MemoryStore()
    run, _ = runs(store).begin(keep=Keep(9))
    run.save(5, runs.state(5)).wait(30)
    run.save(10, runs.state(10)).wait(30)
    first = Catalog(store).find(10).n
    run.add_metrics(10, {"loss": 1.0})
    run.restore(runs.state(), step=5)
    run.save(10, runs.state(10)).wait(30)
    second = Catalog(store).find(10).n
    run.add_metrics(10, {"loss": 2.0})
    run.restore(runs.state(), n=first)
    run.add_metrics(10, {"error": 3.0})
    run.restore(runs.state(), n=second)
    run.add_metrics(10, {"error": 4.0})
    run.close()
    found = {f.n: dict(f.metrics) for f in Catalog(store).list() if f.step == 10}
    assert found == {first: {"loss": 1.0, "error": 3.0}, second: {"loss": 2.0, "error": 4.0}}


def test_commit_that_is_pinned_or_found_by_its_tag_is_told_with_its_late_metrics(runs: Any) -> None:
    run, _ = runs(MemoryStore()).begin()
    run.save(1, runs.state(1), metrics={"loss": 2.0}).wait(30)
    run.add_metrics(1, {"error": 3.0})
    run.close()
    want = {"loss": 2.0, "error": 3.0}
    assert [dict(f.metrics) for f in (run.pin(1), run.tag("good", 1), run.tagged("good"), *run.list())] == [want] * 4
