"""What holds for every history of a job: faults, edits, reports, crashes between writes and stale views, at random.

The transcripts say what the planner does; this says what it never does, for histories that nobody thought of.
"""

from __future__ import annotations

import copy
import time
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep_local.plan.simulation import cluster as plan_world
from everstep_operator.api.conditions import ConditionType
from everstep_operator.api.status import Restarts, Status
from everstep_operator.api.types import RendezvousBackend, TrainingJobSpec
from everstep_operator.plan.actions import CreatePod, DeleteJob
from everstep_operator.plan.decide.completion import is_finished
from everstep_operator.plan.explain import explain
from everstep_operator.plan.outcome import Plan
from everstep_operator.plan.planner import plan
from everstep_operator.plan.snapshot import (
    Exit,
    JobView,
    NodeHealth,
    NodeView,
    PodPhase,
    ReportedProgress,
    Snapshot,
    WorkerPod,
)
from everstep_operator.round_view import RoundView
from support.operator.pod_faults import PodFaults
from support.operator.programs import all_of_the_present_spec, no_two_programs

PASSES = 12  # more than any settled job needs
SECRET = "hunter2-wandb-key"
RULES = [
    {"onExitCodes": [64], "action": "Fail"},
    {"onReasons": ["OOMKilled"], "action": "Restart"},
    {"onReasons": ["Error"], "action": "RestartUncharged"},
]
MESSAGES = [
    "",
    "RuntimeError: Connection closed by peer",
    "RendezvousTimeoutError",
    "Root Cause (first observed failure):\n  exitcode  : -9 (pid: 7)",
    "Root Cause (first observed failure):\n  exitcode  : 999 (pid: 7)",
    '{"everstep":1,"exit_code":64,"error":"ValueError: no","lines":["a"]}',
    '{"everstep":1,"exit_code":1e999,"error":"ValueError: no"}',
    '{"everstep":1,"exit_code":1,"error":"\\ud800","lines":["\\udfff"]}',
    '{"everstep":1,"exit_code":1,"error":"' + "token=a," * 400 + '","lines":["' + "token=a," * 100 + '"]}',
    f"could not log in with {SECRET}",
]

index = st.integers(0, 3)
faults = st.one_of(
    st.tuples(st.just("ready"), index),
    st.tuples(st.just("succeed"), index),
    st.tuples(st.just("fail"), index, st.sampled_from([1, 2, 64, 84, 85, 137, 143, 255]), st.sampled_from(MESSAGES)),
    st.tuples(st.just("oom"), index),
    st.tuples(st.just("evict"), index),
    st.tuples(st.just("reject"), index),
    st.tuples(st.just("side_car"), index),
    st.tuples(st.just("obey"), index),
    st.tuples(st.just("delete"), index),
    st.tuples(st.just("gone"), index),
    st.tuples(st.just("node"), st.sampled_from(["n1", "n2"]), st.booleans()),
    st.tuples(st.just("scale"), st.integers(1, 4)),
    st.tuples(st.just("edit"), st.sampled_from(["maxRestarts", "noProgressLimit"]), st.integers(1, 4)),
    st.tuples(st.just("rules"), st.booleans()),
    st.tuples(st.just("image"), st.integers(1, 3)),
    st.tuples(st.just("rerun")),
    st.tuples(st.just("linger")),
    st.tuples(st.just("end")),
    st.tuples(st.just("report"), st.integers(0, 50)),
    st.tuples(st.just("advance"), st.sampled_from([0.5, 3, 60, 4000])),
    st.tuples(st.just("refuse"), st.booleans()),
    st.tuples(st.just("keep")),  # an operator keeps this snapshot and will act on it much later
    st.tuples(st.just("wake")),  # … now
    st.tuples(st.just("crash"), st.booleans(), st.integers(0, 4), st.integers(0, 31)),
    st.tuples(st.just("refused_writes"), st.integers(0, 255)),
    st.tuples(st.just("act")),
    st.tuples(st.just("act")),
)


class History(PodFaults):
    """The toy cluster with a compare-and-swap, an operator that may be cut or stale, and the invariants as it goes."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module.World())
        self.cut = module.Cut
        template = copy.deepcopy(module.TEMPLATE)
        template["spec"]["containers"][0]["env"] = [{"name": "WANDB_API_KEY", "value": SECRET}]
        self.world.spec = {"replicas": 2, "rendezvous": {"backend": "c10d"}, "template": template, "recovery": {}}
        self.version = 0
        self.kept: tuple[int, Snapshot] | None = None
        self.finished: dict[str, Any] | None = None
        self.said: list[str] = []

    def do(self, name: str, *args: Any) -> None:
        getattr(self, name)(*args)
        if self.finished is not None:
            assert self.world.status.to_wire() == self.finished, "a finished job changed"
        names = [p.name for p in self.world.pods.values() if p.round == self.world.status.world.round]
        assert len(names) == len(set(names))
        assert len({p.index for p in self.world.pods.values() if p.name in names}) == len(names), "two of one index"

    def ready(self, index: int) -> None:
        if self.running(index):
            self.world.do_ready(str(index))

    def fail(self, index: int, code: int, message: str) -> None:
        if (name := self.running(index)) is not None:
            self.world.change(
                name, phase=PodPhase.FAILED, ready=False, exit=Exit(code, "Error", message, self.world.now)
            )

    def oom(self, index: int) -> None:
        if self.running(index):
            self.world.do_fail(str(index), "137", "", "OOMKilled")

    def scale(self, replicas: int) -> None:
        self.world.spec["replicas"] = replicas

    def edit(self, field: str, value: int) -> None:
        self.world.spec["recovery"][field] = value

    def rules(self, given: bool) -> None:
        self.world.spec["recovery"]["rules"] = RULES if given else []

    def rerun(self) -> None:
        if is_finished(self.world.status):  # the API server takes it of no other job
            self.world.spec["rerun"] = self.world.status.rerun + 1

    def report(self, step: int) -> None:
        if self.world.status.world.round:
            self.world.do_step(str(step))

    def advance(self, seconds: float) -> None:
        self.world.do_advance(str(seconds))

    def refuse(self, refused: bool) -> None:
        self.world.do_refuse(f"quota; the webhook quotes {SECRET}" if refused else "")

    def keep(self) -> None:
        self.kept = (self.version, self.world.snapshot())

    def wake(self) -> None:
        """A stale operator acts: its publish and its status are refused if the job has moved on."""
        if self.kept is not None:
            version, snapshot = self.kept
            self.carry_out(version, snapshot, self.cut())

    def act(self) -> None:
        self.carry_out(self.version, self.world.snapshot(), self.cut())

    def crash(self, written: bool, stage: int, done: int) -> None:
        """The operator dies: before it writes the status, or within a stage, of which any subset is done."""
        self.carry_out(self.version, self.world.snapshot(), self.cut(stage, done, 0, written))

    def refused_writes(self, fails: int) -> None:
        """It lives, and some of its writes fail: what depends on them is left out."""
        self.carry_out(self.version, self.world.snapshot(), self.cut(None, 0, fails))

    def carry_out(self, version: int, snapshot: Snapshot, cut: Any) -> Plan:
        decided = plan(snapshot)
        assert plan(snapshot) == decided, "the same snapshot gave another plan"
        self.said.append(explain(snapshot, decided) + repr(decided.status) + repr(decided.events) + decided.reason)
        complete = decided.status.condition(ConditionType.COMPLETE)
        if complete is not None and complete.status == "True" and not is_finished(snapshot.job.status):
            current = {p.name for p in snapshot.pods if p.round == snapshot.job.status.world.round}
            assert not self.obeyed & current, "who ended because it was told to has succeeded"
        before = self.world.status
        writes = decided.publish or decided.status != snapshot.job.status
        if writes and version != self.version:
            return decided  # the compare-and-swap is refused, and the pass ends
        newest = {uid: p for uid, p in self.world.pods.items() if p.round >= before.world.round}
        pods = dict(self.world.pods)
        self.world.apply(decided, cut)
        no_two_programs(self.world, snapshot, pods)
        if not writes:
            # A status that the plan leaves as it saw it is not written: it may be older than what is there.
            self.world.status = before
        if self.world.status != before:
            self.version += 1
            if is_finished(before) and not is_finished(self.world.status):
                assert self.world.status.rerun == self.world.spec["rerun"] > before.rerun, "nobody wanted that"
                assert len(self.world.status.history) == min(10, len(before.history) + 1)
                self.finished = None
            else:
                self.charged_once(before.restarts, self.world.status.restarts, before, self.world.status)
        if is_finished(self.world.status) and self.finished is None:
            self.finished = self.world.status.to_wire()
        if self.world.status.world.round == before.world.round and self.finished is None:
            assert newest.items() <= self.world.pods.items(), "a pod of the round that trains was taken"
        return decided

    @staticmethod
    def charged_once(old: Restarts, new: Restarts, before: Status, after: Status) -> None:
        grown = after.world.round - before.world.round
        assert grown in (0, 1), "a round was skipped, or counted back"
        charged = new.total - old.total
        ready = after.condition(ConditionType.READY)
        lost = grown == 1 and ready is not None and ready.reason == "Recovering"
        assert charged == lost, "a restart was charged without a loss, more than once, or not at all"
        assert all(getattr(new, n) >= getattr(old, n) for n in ("user_code", "infrastructure", "preemption"))
        if charged:
            assert after.recoveries[0].first_step_ms is None
            assert len(after.recoveries) == min(10, len(before.recoveries) + 1), (
                "no recovery tells of a charged restart"
            )

    def settle(self) -> None:
        """No more faults: nodes are back, creates are allowed, time passes. The job must come to rest."""
        for name in ("n1", "n2"):
            self.do("node", name, True)
        self.do("refuse", False)
        for _ in range(PASSES):
            self.do("advance", 400)  # beyond any back-off
            decided = self.carry_out(self.version, self.world.snapshot(), self.cut())
            self.do("keep")
            self.world.pods = {
                n: p for n, p in self.world.pods.items() if p.deleted_at is None or p.round == self.now_round
            }
            if not decided.actions and self.at_rest():
                return
        raise AssertionError(f"not at rest after {PASSES} passes: {self.said[-2:]}")

    @property
    def now_round(self) -> int:
        return int(self.world.status.world.round)

    def at_rest(self) -> bool:
        status = self.world.status
        if is_finished(status):
            return True
        alive = sorted(p.index for p in self.world.pods.values() if p.round == self.now_round)
        whole = alive == list(range(status.world.size)) and status.world.size == self.world.spec["replicas"]
        return whole and all_of_the_present_spec(self.world)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(faults, max_size=20))
def test_history_of_faults_cut_anywhere_converges_and_breaks_no_rule(events: list[tuple[Any, ...]]) -> None:
    history = History(plan_world)
    for name, *args in [("act",), *events]:
        history.do(name, *args)
    history.settle()
    assert not any(SECRET in text for text in history.said), "a secret of the spec was shown"


texts = st.one_of(st.none(), st.text(max_size=30), st.sampled_from(MESSAGES), st.just("\ud800"))
numbers = st.one_of(st.none(), st.integers(0, 2**63 - 1), st.integers(0, 100))
reals = st.one_of(st.none(), st.floats(0, allow_nan=False, allow_infinity=False))
moments = st.one_of(st.none(), st.integers(-(10**6), 10**6).map(lambda s: timedelta(seconds=s)))


@st.composite
def odd_pods(draw: st.DrawFn) -> Any:
    life = draw(st.integers(-1, 6))
    round_ = None if draw(st.booleans()) else life
    number = draw(st.integers(-1, 5))
    uid = draw(st.text("abcdef", min_size=8, max_size=8))
    deleted, ended = draw(moments), draw(moments)
    incarnation = life if round_ is None else round_ - 1
    name = f"digits-w{number}-{incarnation}" if draw(st.booleans()) else draw(st.text("abc", min_size=1, max_size=5))
    exit_ = draw(
        st.one_of(st.none(), st.tuples(st.integers(-(2**31), 2**31 - 1), texts, texts))
    )  # fmt: skip

    def at(start: Any) -> WorkerPod:
        return WorkerPod(
            name, uid, number, incarnation, round_,
            phase=phase, ready=ready, node=node,
            deleted_at=None if deleted is None else start + deleted,
            reason=reason, disruption=disruption, waiting=waiting, unschedulable=unschedulable,
            exit=None if exit_ is None else Exit(*exit_, finished_at=None if ended is None else start + ended),
        )  # fmt: skip

    phase, ready = draw(st.sampled_from(PodPhase)), draw(st.booleans())
    node = draw(st.sampled_from([None, "n1", "n2", "unknown"]))
    reason, disruption, waiting, unschedulable = draw(texts), draw(texts), draw(texts), draw(texts)
    return at


odd_progress = st.builds(
    dict,
    round=st.integers(0, 6), step=numbers, total_steps=numbers, epoch=numbers, step_seconds=reals,
    metrics=st.dictionaries(st.one_of(st.text(max_size=60), st.just("\ud800")), st.floats(), max_size=9),
    committed_step=numbers, checkpoint_error=texts, straggler=texts, rehearsed=texts, productive_seconds=st.floats(0),
    restored_step=numbers, restore_seconds=reals,
)  # fmt: skip


indices = st.integers(0, 6)
odd_views = st.one_of(
    st.none(),
    st.builds(
        RoundView,
        round=st.sampled_from([0, 1, 7, 2**53 - 1]),
        members=st.lists(st.tuples(st.integers(0, 2**16), st.sampled_from([0, 1, 2**53 - 1])), max_size=4).map(tuple),
        gone=st.lists(indices, max_size=3).map(tuple),
        joining=st.lists(indices, max_size=3).map(tuple),
        closed=texts,
        finished=st.booleans(),
    ),
)
odd_rosters = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {
            "wanted": st.integers(0, 5),
            "nextIncarnation": st.sampled_from([0, 3, 99_999_999]),
            "workers": st.lists(
                st.fixed_dictionaries(
                    {
                        "first": indices,
                        "last": indices,
                        "incarnation": st.sampled_from([0, 1, 99_999_999]),
                        "started": st.booleans(),
                    }
                ),
                max_size=4,
            ),
        }
    ),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pods=st.lists(odd_pods(), max_size=6),
    progress=odd_progress,
    nodes=st.dictionaries(st.sampled_from(["n1", "n2"]), st.sampled_from(NodeHealth)),
    world=st.tuples(st.integers(0, 5), st.integers(0, 4), st.booleans()),
    refused=texts,
    reported=st.booleans(),
    backend=st.sampled_from(RendezvousBackend),
    view=odd_views,
    roster=odd_rosters,
)
def test_snapshot_of_odd_values_has_a_plan_that_can_be_stored(
    pods: list[Any],
    progress: dict[str, Any],
    nodes: dict[str, NodeHealth],
    world: tuple[int, int, bool],
    refused: str | None,
    reported: bool,
    backend: RendezvousBackend,
    view: RoundView | None,
    roster: dict[str, Any] | None,
) -> None:
    start = plan_world.START
    now = start + timedelta(hours=1)
    round_, size, formed = world
    made = Status.model_validate(
        {
            "startTime": start,
            "world": {"round": round_, "size": size, "formedAt": start if formed else None},
            "roster": roster,
        }
    )
    seen = {p.uid: p for p in (at(now) for at in pods)}
    times = dict.fromkeys(
        ("updated_at", "started_at", "restored_at", "trained_at", "first_step_at"), now if reported else None
    )
    etcd = {"etcd": {"endpoints": ["http://e:2379"]}} if backend is RendezvousBackend.ETCD else {}
    raw = {**plan_world.World().spec, "rendezvous": {"backend": backend, **etcd}}
    spec = TrainingJobSpec.model_validate(raw)
    snapshot = Snapshot(
        now,
        JobView("default", "digits", "uid-1", 1, "1", spec, made, start),
        tuple(seen.values()),
        "uid-s",
        {name: NodeView(name, health, start) for name, health in nodes.items()},
        ReportedProgress(**progress, **times),
        (),
        refused,
        world=view,
    )
    decided = plan(snapshot)
    assert plan(snapshot) == decided
    wire = str(decided.status.to_wire()) + explain(snapshot, decided)
    wire.encode()  # what cannot be encoded cannot be written
    for action in decided.actions:
        if isinstance(action, CreatePod):
            made = decided.status.roster
            assert action.index < snapshot.job.spec.replicas or action.index < size or made is not None
        assert not isinstance(action, DeleteJob)


BOMBS = {
    "deep arrays": '{"everstep":' + "[" * 4000,
    "deep objects": '{"everstep":' + '{"a":' * 1600,
    "a long line": '{"everstep":1,"error":"' + "x" * 10_000_000,
    "many lines": '{"everstep"\n' * 1_000_000,
    "root causes": "Root Cause" * 800_000,
    "root causes that never end": ("Root Cause" + "exitcode " * 40) * 20_000,
    "spaces before a colon": "Root Cause exitcode" + " " * 8000,
    "half a token": "token" * 2_000_000,
    "a URL without an end": "://" + "a:" * 5_000_000,
    "an endless number": '{"everstep":1,"error":"e","exit_code":' + "9" * 8000 + "}",
    "nested lines": '{"everstep":1,"exit_code":1,"error":"e","lines":' + "[" * 900 + "]" * 900 + "}",
}


@pytest.mark.parametrize("bomb", sorted(BOMBS))
def test_exit_message_that_is_a_bomb_costs_little_time_and_fits_the_status(bomb: str) -> None:
    world = plan_world.World()
    world.do_job("recovery.maxRestarts=0")
    world.do_settle()
    world.do_fail("0", "1", "")
    world.change(world.current(0), exit=Exit(1, "Error", BOMBS[bomb], world.now))
    snapshot = world.snapshot()
    started = time.process_time()
    decided = plan(snapshot)
    assert time.process_time() - started < 0.5
    assert is_finished(decided.status)
    assert len(str(decided.status.to_wire())) < 20_000


def test_deleted_status_with_pods_of_later_rounds_goes_on_counting() -> None:
    """Case 15: rounds are the fence of the commit log, so a status that somebody emptied must not restart them."""
    world = plan_world.World()
    for _ in range(3):
        world.do_settle()
        world.do_ready("0", "1")
        world.do_settle()
        world.do_fail("0", "137")
    world.do_settle()
    assert world.status.world.round == 4
    world.status = Status()
    world.reconcile()
    assert world.status.world.round == 5
    assert sorted(world.pods) == ["digits-w0-4", "digits-w1-4"]


def test_stale_view_of_the_job_never_deletes_pods_of_a_newer_round() -> None:
    world = plan_world.World()
    world.do_settle()
    old = world.status
    world.do_ready("0", "1")
    world.do_settle()
    world.do_fail("1", "137")
    world.do_settle()
    assert sorted(world.pods) == ["digits-w0-1", "digits-w1-1"]
    world.status = old
    decided = plan(world.snapshot())
    # It publishes a round that is newer than all, and is refused; what it would do without publishing is nothing.
    assert decided.publish
    assert decided.status.world.round == 3


def test_pod_that_a_stranger_labelled_as_a_worker_is_removed_and_stops_nothing() -> None:
    world = plan_world.World()
    world.do_settle()
    world.pods["intruder"] = WorkerPod("intruder", "x", 0, 0, 1, PodPhase.RUNNING, node="n1")
    text = world.reconcile()
    assert "delete pod intruder" in text
    assert sorted(world.pods) == ["digits-w0-0", "digits-w1-0"]


def test_world_of_no_workers_in_the_status_is_not_taken_for_a_complete_job() -> None:
    world = plan_world.World()
    world.status = Status.model_validate({"world": {"round": 3, "size": 0}})
    world.reconcile()
    assert not is_finished(world.status)
    assert world.status.world.round == 4
