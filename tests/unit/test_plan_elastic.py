"""What holds for every history of a job whose agents form the rounds: one worker at a time, always (ADR 0010).

The transcripts in transcripts/elastic say what the planner does; this says what it never does.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep_local.plan.simulation import agents as elastic_world
from everstep_local.plan.simulation.cluster import TEMPLATE, Cut
from everstep_operator.api.conditions import ConditionStatus, ConditionType
from everstep_operator.api.status import Status
from everstep_operator.api.types import TrainingJobSpec
from everstep_operator.plan.actions import CreatePod, DeletePod
from everstep_operator.plan.check import PlanError, check
from everstep_operator.plan.decide.completion import is_finished
from everstep_operator.plan.outcome import Plan
from everstep_operator.plan.planner import plan
from everstep_operator.plan.snapshot import Exit, PodPhase, Snapshot, WorkerPod
from everstep_operator.plan.stages import Stage, StageName, staged
from everstep_operator.plan.state import pod_hash, roster, sizing
from everstep_operator.plan.state.losses import Charge, losses_among
from everstep_operator.round_view import RoundView
from support.operator.pod_faults import PodFaults
from support.operator.programs import all_of_the_present_spec, no_two_programs

PASSES = 20
index = st.integers(0, 5)
faults = st.one_of(
    st.tuples(st.just("ready"), index),
    st.tuples(st.just("ready"), index),
    st.tuples(st.just("form")),
    st.tuples(st.just("form")),
    st.tuples(st.just("gone_from"), index),
    st.tuples(st.just("succeed"), index),
    st.tuples(st.just("fail"), index, st.sampled_from([1, 84, 86, 137, 143])),
    st.tuples(st.just("evict"), index),
    st.tuples(st.just("reject"), index),
    st.tuples(st.just("side_car"), index),
    st.tuples(st.just("obey"), index),
    st.tuples(st.just("delete"), index),
    st.tuples(st.just("gone"), index),
    st.tuples(st.just("node"), st.sampled_from(["n1", "n2"]), st.booleans()),
    st.tuples(st.just("scale"), st.integers(2, 6)),
    st.tuples(st.just("bounds"), st.integers(1, 2), st.integers(6, 8)),
    st.tuples(st.just("regrow"), st.booleans()),
    st.tuples(st.just("spares"), st.integers(0, 2)),
    st.tuples(st.just("suspend"), st.booleans()),
    st.tuples(st.just("image"), st.integers(1, 3)),
    st.tuples(st.just("rerun")),
    st.tuples(st.just("close")),
    st.tuples(st.just("linger")),
    st.tuples(st.just("end")),
    st.tuples(st.just("report"), st.integers(0, 50)),
    st.tuples(st.just("advance"), st.sampled_from([0.5, 3, 60, 4000])),
    st.tuples(st.just("refuse"), st.booleans()),
    st.tuples(st.just("keep")),  # an operator keeps this snapshot and will act on it much later
    st.tuples(st.just("wake")),  # … now
    st.tuples(st.just("crash"), st.booleans(), st.integers(0, 6), st.integers(0, 255)),
    st.tuples(st.just("refused_writes"), st.integers(0, 4095)),
    st.tuples(st.just("act")),
    st.tuples(st.just("act")),
)


class History(PodFaults):
    """The toy cluster with a compare-and-swap, an operator that may be cut or stale, and the invariants as it goes."""

    def __init__(self, module: ModuleType, *, etcd: bool) -> None:
        super().__init__(module.ElasticWorld())
        self.cut = Cut
        self.world.spec["recovery"] = {"maxRestarts": 50, "noProgressLimit": 1000}
        if etcd:
            self.world.do_etcd()
        self.version = 0
        self.kept: tuple[int, Snapshot] | None = None
        self.finished: dict[str, Any] | None = None
        self.published: set[tuple[int, int]] = set()

    def do(self, name: str, *args: Any) -> None:
        getattr(self, name)(*args)
        if self.finished is not None:
            assert self.world.status.to_wire() == self.finished, "a finished job changed"

    def ready(self, index: int) -> None:
        name = self.running(index)
        if name is not None and self.world.pods[name].deleted_at is None:
            self.world.do_ready(str(index))

    def form(self) -> None:
        if self.world.view is not None and self.finished is None and self.world.view.closed is None:
            before = self.world.status
            self.world.do_form()
            self.version += self.world.status != before

    def gone_from(self, index: int) -> None:
        if self.world.view is not None and index in dict(self.world.view.members):
            self.world.do_gone_from(str(index))

    def fail(self, index: int, code: int) -> None:
        if (name := self.running(index)) is not None:
            exit_ = Exit(code, "Error", "", self.world.now)
            self.world.change(name, phase=PodPhase.FAILED, ready=False, exit=exit_)

    def scale(self, replicas: int) -> None:
        self.world.spec["replicas"] = replicas

    def bounds(self, least: int, most: int) -> None:
        self.world.spec["elastic"].update(minReplicas=least, maxReplicas=most)

    def regrow(self, wanted: bool) -> None:
        self.world.spec["elastic"]["regrow"] = wanted

    def spares(self, wanted: int) -> None:
        if self.world.spec["rendezvous"]["backend"] == "everstep":
            self.world.spec["elastic"]["spares"] = wanted

    def suspend(self, wanted: bool) -> None:
        self.world.spec["suspend"] = wanted

    def rerun(self) -> None:
        if is_finished(self.world.status):  # the API server takes it of no other job
            self.world.spec["rerun"] = self.world.status.rerun + 1

    def close(self) -> None:
        """All members have succeeded, and end."""
        if self.world.view is not None and self.world.view.members and not self.world.view.gone:
            self.world.do_close()

    def report(self, step: int) -> None:
        if self.world.status.world.formed_at is not None:
            self.world.do_step(str(step))

    def advance(self, seconds: float) -> None:
        self.world.do_advance(str(seconds))

    def refuse(self, refused: bool) -> None:
        self.world.do_refuse("quota" if refused else "")

    def keep(self) -> None:
        self.kept = (self.version, self.world.snapshot())

    def wake(self) -> None:
        if self.kept is not None:
            self.carry_out(*self.kept, self.cut())

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
        self.judged(snapshot, decided)
        before, pods = self.world.status, dict(self.world.pods)
        writes = decided.publish or decided.status != snapshot.job.status
        if writes and version != self.version:
            return decided  # the compare-and-swap is refused, and the pass ends
        self.world.apply(decided, cut)
        no_two_programs(self.world, snapshot, pods)
        if not writes:
            self.world.status = before  # what the plan leaves as it saw it is not written
        self.version += self.world.status != before
        self.carried(before, pods)
        return decided

    def judged(self, snapshot: Snapshot, decided: Plan) -> None:
        """What a plan may conclude from what it was shown."""
        old, new = roster.from_status(snapshot.job.status.roster), roster.from_status(decided.status.roster)
        current = old.current("digits", snapshot.pods)
        lost = losses_among(snapshot, current, {i: life.started for i, life in old.workers.items()})
        known = {loss.index for loss in lost} | {p.index for p in snapshot.pods if p.incarnation > 0}
        known |= {p.index for p in pod_hash.outdated(snapshot, current.values())}
        finished = {i for i, p in current.items() if p.succeeded}
        for i, life in new.workers.items():
            if i in old.workers and life.number != old.workers[i].number:
                assert i in known or (i in finished and (lost or known)), f"worker {i} was replaced, and was not lost"
        if (
            is_complete(decided.status)
            and not is_finished(snapshot.job.status)
            and (snapshot.world is None or not snapshot.world.finished)
        ):
            assert not self.obeyed & {p.name for p in current.values()}, (
                "who ended because it was told to has succeeded"
            )
        restarts, charged = snapshot.job.status.restarts, decided.status.restarts.user_code
        if charged != restarts.user_code:
            assert charged == restarts.user_code + 1
            assert any(loss.charge is Charge.USER_CODE for loss in lost), "charged without a failure of the program"

    def carried(self, before: Status, pods: dict[str, WorkerPod]) -> None:
        """What holds for the cluster after any prefix of any plan, of an operator with any view."""
        status = self.world.status
        made = roster.from_status(status.roster)
        self.published |= {(i, life.number) for i, life in made.workers.items()}
        assert status.world.round >= before.world.round
        assert made.next_incarnation >= roster.from_status(before.roster).next_incarnation
        for name in self.world.pods.keys() - pods.keys():
            pod = self.world.pods[name]
            assert (pod.index, pod.incarnation) in self.published, f"{name} was created, and nobody published it"
        over = is_finished(status)
        if is_finished(before) and not over:
            assert status.rerun == self.world.spec["rerun"] > before.rerun, "begun anew, and nobody wanted that"
            assert len(status.history) == min(10, len(before.history) + 1)
            self.finished = None
        for name in pods.keys() - self.world.pods.keys():
            pod, life = pods[name], made.workers.get(pods[name].index)
            assert over or life is None or life.number != pod.incarnation, f"{name} is wanted, and was deleted"
        current = made.current("digits", self.world.pods.values())
        assert len(current) <= made.wanted + made.spares or over
        if over and self.finished is None:
            self.finished = status.to_wire()

    def settle(self) -> None:
        """No more faults: nodes are back, agents meet, time passes. The job must come to its full size."""
        self.do("suspend", False)
        self.do("regrow", True)
        for name in ("n1", "n2"):
            self.do("node", name, True)
        self.do("refuse", False)
        for _ in range(PASSES):
            self.do("advance", 400)  # beyond any back-off
            decided = self.carry_out(self.version, self.world.snapshot(), self.cut())
            if self.finished is not None:
                return
            self.world.pods = {n: p for n, p in self.world.pods.items() if p.deleted_at is None}
            for i in sorted(roster.from_status(self.world.status.roster).workers):
                self.do("ready", i)
            self.do("form")
            if not decided.actions and not decided.publish and self.at_rest():
                return
        raise AssertionError(f"not at rest after {PASSES} passes: {decided}")

    def at_rest(self) -> bool:
        lives = roster.from_status(self.world.status.roster).workers
        alive = {p.index: p.incarnation for p in self.world.pods.values() if p.deleted_at is None}
        whole = {i: life.number for i, life in lives.items()} == alive
        done = any(p.finished for p in self.world.pods.values())
        wanted, spares = self.world.spec["replicas"], self.world.spec["elastic"].get("spares", 0)
        view = self.world.view
        trains = view is None or done or (len(view.members) == wanted and set(view.members) <= alive.items())
        return whole and len(lives) == wanted + spares and trains and all_of_the_present_spec(self.world)


def is_complete(status: Status) -> bool:
    complete = status.condition(ConditionType.COMPLETE)
    return complete is not None and complete.status is ConditionStatus.TRUE


@pytest.mark.parametrize("etcd", [False, True])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(events=st.lists(faults, max_size=30))
def test_history_of_faults_cut_anywhere_ends_at_full_size_and_breaks_no_rule(
    etcd: bool, events: list[tuple[Any, ...]]
) -> None:
    history = History(elastic_world, etcd=etcd)
    for name, *args in [("act",), *events]:
        history.do(name, *args)
    history.settle()


def formed(module: ModuleType, replicas: int = 4, **elastic: Any) -> Any:
    world = module.ElasticWorld()
    world.spec["replicas"] = replicas
    world.spec["elastic"].update(elastic)
    world.do_settle()
    world.do_ready(*map(str, range(replicas)))
    world.do_form()
    world.do_settle()
    world.do_advance("60")
    return world


@settings(max_examples=60, deadline=None)
@given(
    lost=st.sets(st.integers(0, 5), min_size=1, max_size=6),
    stage=st.integers(0, 3),
    done=st.integers(0, 63),
    fails=st.integers(0, 63),
    seed=st.integers(0, 3),
)
def test_any_workers_lost_and_any_crash_of_the_operator_leave_the_others_pods_and_end_at_full_size(
    lost: set[int], stage: int, done: int, fails: int, seed: int
) -> None:
    world = formed(elastic_world, 6)
    before = {p.index: p.uid for p in world.pods.values()}
    ways = [lambda i: world.do_fail(i, "137"), world.do_gone, world.do_evict, world.do_delete]
    for i in lost:
        ways[(i + seed) % 4](str(i))
    world.apply(plan(world.snapshot()), Cut(stage, done, fails))
    world.pods = {n: p for n, p in world.pods.items() if p.deleted_at is None}
    world.do_settle()
    after = {p.index: p.uid for p in world.pods.values()}
    assert set(after) == set(range(6))
    assert {i for i in after if after[i] != before[i]} == lost
    world.do_ready(*map(str, range(6)))
    world.do_form()
    world.do_settle()
    assert world.status.world.size == 6
    assert world.status.restarts.user_code == 0


def test_stale_operator_creates_only_what_was_published_and_deletes_nothing_that_is_wanted() -> None:
    world = formed(elastic_world)
    old = world.snapshot()
    world.do_fail("1", "137")
    world.do_settle()
    world.do_ready("1")
    stale = Snapshot(old.now, old.job, tuple(world.pods.values()), old.service_uid, old.nodes, world=old.world)
    decided = plan(stale)
    # It takes worker 1 for lost, publishes, and is refused; what it would do without publishing is nothing.
    assert decided.publish
    assert not [a for a in decided.actions if isinstance(a, DeletePod)]


def test_pod_of_a_later_roster_is_not_ended_by_an_older_one() -> None:
    made = roster.Roster(2, 1, {0: roster.Incarnation(0), 1: roster.Incarnation(2)})

    def supersedes(index: int, incarnation: int, name: str | None = None) -> bool:
        name = name or f"digits-w{index}-{incarnation}"
        return made.supersedes("digits", WorkerPod(name, "u", index, incarnation, None, PodPhase.RUNNING))

    assert [supersedes(1, n) for n in (0, 1, 2, 3)] == [True, True, False, False]
    assert [supersedes(5, n) for n in (0, 1, 2)] == [True, False, False]
    assert supersedes(1, 3, "stranger")


def test_roster_that_somebody_edited_back_takes_the_incarnations_of_the_pods() -> None:
    """Case 15."""
    world = formed(elastic_world)
    for _ in range(2):
        world.do_fail("1", "137")
        world.do_settle()
        world.do_ready("1")
        world.do_settle()
        world.do_advance("60")
    pods = sorted(world.pods)
    assert "digits-w1-2" in pods
    edited = roster.Roster(4, 0, {i: roster.Incarnation(0) for i in range(3)})
    world.status = world.status.model_copy(update={"roster": roster.to_status(edited)})
    world.do_settle()
    assert sorted(world.pods) == pods
    assert str(world.published()) == "0@0 1@2 2-3@0"


def test_rounds_below_the_minimum_are_never_called_running() -> None:
    world = formed(elastic_world, minReplicas=3)
    world.view = RoundView(2, ((0, 0), (1, 0)))
    world.reconcile()
    ready = world.status.condition("Ready")
    assert ready.status == "False"
    assert ready.reason == "Recovering"


def test_live_resize_leaves_every_pod_that_stays() -> None:
    world = formed(elastic_world)
    before = {p.name: p.uid for p in world.pods.values()}
    for size in (7, 5, 2, 8, 4):
        world.do_job(f"replicas={size}")
        world.do_settle()
        assert len(world.pods) == size
    assert {n: p.uid for n, p in world.pods.items() if p.index < 2} == {
        n: uid for n, uid in before.items() if n in ("digits-w0-0", "digits-w1-0")
    }


@pytest.mark.parametrize(
    ("elastic", "replicas", "wanted", "allowed"),
    [
        ({"minReplicas": 2, "maxReplicas": 8}, 5, 5, ()),
        ({"minReplicas": 2, "maxReplicas": 8, "sizes": [8, 2, 4]}, 6, 4, (2, 4)),
        ({"minReplicas": 2, "maxReplicas": 8, "groupSize": 2}, 6, 6, (2, 4, 6)),
        ({"minReplicas": 2, "maxReplicas": 8, "groupSize": 2}, 5, 4, (2, 4)),
        (None, 3, 3, ()),
    ],
)
def test_sizes_that_agents_may_form_now_end_at_what_is_wanted(
    elastic: dict[str, Any] | None, replicas: int, wanted: int, allowed: tuple[int, ...]
) -> None:
    raw = {"replicas": replicas, "template": TEMPLATE, "rendezvous": {"backend": "everstep"}}
    spec = TrainingJobSpec.model_validate({**raw, **({"elastic": elastic} if elastic else {})})
    assert sizing.wanted(spec) == wanted
    sizes = sizing.present(spec, replicas)
    assert (sizes.maximum, sizes.allowed) == (wanted, allowed)
    assert sizes.largest(wanted) == wanted
    assert sizes.largest(sizes.minimum - 1) == 0
    assert sizing.present(spec, 0).maximum == sizes.minimum, "with fewer places it may still run"


lives = st.dictionaries(st.integers(0, 4095), st.tuples(st.integers(0, 99_999_999), st.booleans()), max_size=40)


@given(lives, st.integers(0, 4096), st.integers(0, 99_999_999))
def test_roster_written_and_read_again_is_the_same(
    made: dict[int, tuple[int, bool]], wanted: int, following: int
) -> None:
    before = roster.Roster(wanted, following, {i: roster.Incarnation(*made[i]) for i in sorted(made)})
    assert roster.from_status(roster.to_status(before)) == before


@given(lives, st.integers(0, 60), st.sets(st.integers(0, 4095)), st.booleans(), st.integers(0, 3))
def test_revised_roster_never_uses_a_name_twice(
    made: dict[int, tuple[int, bool]], wanted: int, lost: set[int], replaced: bool, spares: int
) -> None:
    snapshot = elastic_world.ElasticWorld().snapshot()
    known = {i: roster.Incarnation(min(n, 1000), s) for i, (n, s) in sorted(made.items())}
    old = roster.Roster(len(known), 0, known)
    lost &= set(known)
    members = [i for i in known if i % 2 and i not in lost]
    new = roster.successor(snapshot, old, wanted, lost, replaced=replaced, spares=spares, members=members)
    back = roster.successor(snapshot, new, len(known), (), replaced=True)
    used = {(i, life.number) for i, life in known.items()}
    for i, life in new.workers.items():
        assert (i in known and i not in lost) == ((i, life.number) in used)
    assert len(new.workers.keys() & set(members)) <= wanted
    gone = used - {(i, life.number) for i, life in new.workers.items()}
    assert not gone & {(i, life.number) for i, life in back.workers.items()}
    assert len(back.workers) == len(known)


def test_four_thousand_workers_of_different_incarnations_fit_the_status() -> None:
    made = {i: roster.Incarnation(99_999_000 + i % 2, started=True) for i in range(4096)}
    wire = Status(roster=roster.to_status(roster.Roster(4096, 99_999_999, made))).to_wire()
    assert len(str(wire)) < 400_000  # an object of the API server has at most 1.5 MiB
    same = {i: roster.Incarnation(7, started=True) for i in range(4096)}
    assert len(roster.to_status(roster.Roster(4096, 8, same)).workers) == 1


def test_check_refuses_a_plan_that_deletes_a_survivor() -> None:
    world = formed(elastic_world)
    world.do_fail("1", "137")
    snapshot = world.snapshot()
    decided = plan(snapshot)
    survivor = world.pods["digits-w2-0"]
    doomed = DeletePod(survivor.name, survivor.uid, 1, "no reason")
    clear, *others = decided.stages
    worse = Plan(decided.status, (*staged({StageName.CLEAR: (*clear.actions, doomed)}), *others), publish=True)
    with pytest.raises(PlanError, match="digits-w2-0 is one of the published workers"):
        check(snapshot, worse)
    unpublished = Plan(decided.status, decided.stages)
    with pytest.raises(PlanError, match="not published"):
        check(snapshot, unpublished)
    backwards = Plan(decided.status, decided.stages[::-1], publish=True)
    with pytest.raises(PlanError, match="not in their order"):
        check(snapshot, backwards)
    misplaced = Plan(decided.status, (Stage(StageName.CREATE, clear.actions),), publish=True)
    with pytest.raises(PlanError, match="stage create has the action delete pod"):
        check(snapshot, misplaced)
    late = Stage(StageName.CLEAR, clear.actions, frozenset({StageName.SIZES}))
    with pytest.raises(PlanError, match="which come later"):
        check(snapshot, Plan(decided.status, (late,), publish=True))


def test_thirty_pods_lost_one_after_the_other_are_one_incident() -> None:
    """Case 54: each of thirty failures is seen in a pass of its own; the job is not failed for want of progress."""
    world = elastic_world.ElasticWorld()
    world.spec.update(replicas=40, elastic={"minReplicas": 2, "maxReplicas": 40})
    world.do_settle()
    world.do_ready(*map(str, range(40)))
    world.do_form()
    world.do_step("10")
    world.do_settle()
    world.do_advance("60")
    for i in range(30):
        world.do_fail(str(i), "137")
        world.do_advance("0.1")
        created = [a for a in plan(world.snapshot()).actions if isinstance(a, CreatePod)]
        assert [a.index for a in created] == [i]
        world.reconcile()
    assert not is_finished(world.status)
    assert world.status.restarts.without_progress == 0
    assert world.status.restarts.infrastructure == 1
    assert len(world.status.recoveries) == 1


def test_loss_of_a_replacement_made_in_the_second_of_the_incident_is_an_incident_of_its_own() -> None:
    """Kubernetes tells a pod's creation in whole seconds."""
    world = formed(elastic_world)
    world.do_fail("1", "137")
    world.reconcile()
    world.do_settle()
    began = world.status.restarts.incident_at
    replacement = world.pods["digits-w1-1"]
    world.pods["digits-w1-1"] = replace(replacement, created_at=began.replace(microsecond=0))
    world.do_fail("1", "137")
    world.do_advance("1")
    world.reconcile()
    assert world.status.restarts.infrastructure == 2


def test_world_spec_is_not_changed_by_planning() -> None:
    world = formed(elastic_world)
    before = copy.deepcopy(world.spec)
    world.do_advance(str(timedelta(hours=1).total_seconds()))
    world.reconcile()
    assert world.spec == before
