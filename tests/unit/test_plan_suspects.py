"""Which nodes new pods avoid: what accuses a node and what does not, for how long, and what an exclusion never does."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep_local.plan.simulation.agents import ElasticWorld
from everstep_operator.api.conditions import Cause, Suspicion
from everstep_operator.api.parse import parse_status
from everstep_operator.api.status import Restarts, Status
from everstep_operator.plan.actions import CreatePod
from everstep_operator.plan.outcome import Plan
from everstep_operator.plan.planner import plan
from everstep_operator.plan.snapshot import Fleet, NodeHealth, NodeView, PodPhase, WorkerPod
from everstep_operator.plan.state import suspects
from everstep_operator.plan.state.losses import Loss
from everstep_operator.plan.state.suspects import HALF_LIFE, LIMIT, MOST, ONE_LOSS, Accusation, counted, excluded_until

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NODES = ("n1", "n2", "n3", "n4")
LONGEST = 3 * HALF_LIFE + timedelta(minutes=1)
LOST = Accusation("n1", Suspicion.NODE_LOST)


def after(*gaps: timedelta) -> Restarts:
    """The counters after losses of one node, each so long after the one before."""
    now, restarts = NOW, Restarts()
    for gap in gaps:
        now += gap
        restarts = counted(now, restarts, [LOST])
    return restarts


def test_second_loss_in_half_an_hour_excludes_a_node_and_one_a_day_never_does() -> None:
    day, minutes = timedelta(days=1), timedelta(minutes=30)
    assert not after(minutes).suspect_nodes[0].excluded
    assert after(minutes, minutes).suspect_nodes[0].excluded
    assert not any(after(*[day] * n).suspect_nodes[0].excluded for n in range(1, 9))


def test_workers_that_are_lost_with_one_node_are_one_loss_also_if_several_passes_see_them() -> None:
    restarts = counted(NOW, Restarts(), [LOST] * 8)
    for _ in range(3):
        restarts = counted(restarts.suspect_nodes[0].at + ONE_LOSS, restarts, [LOST] * 8)
    assert restarts.suspect_nodes[0].points <= suspects.POINTS
    assert not restarts.suspect_nodes[0].excluded


def test_node_that_loses_a_worker_every_few_seconds_is_charged_for_it_again_and_again() -> None:
    assert after(*[timedelta(seconds=9)] * 3).suspect_nodes[0].excluded


@given(gaps=st.lists(st.integers(11, 7200), min_size=1, max_size=40))
def test_every_exclusion_ends_whatever_happened_before(gaps: list[int]) -> None:
    now, restarts = NOW, Restarts()
    for gap in gaps:
        now += timedelta(seconds=gap)
        restarts = counted(now, restarts, [LOST])
        (node,) = restarts.suspect_nodes
        assert 0 < node.points <= MOST
        end = excluded_until(node, now)
        if node.points >= LIMIT:
            assert end is not None, "a node that has reached the limit is avoided"
        if end is not None:
            assert now < end <= now + LONGEST
            assert excluded_until(node, end) is None


def test_excluded_node_stays_excluded_by_a_further_loss_although_some_points_are_gone() -> None:
    first = after(timedelta(0), timedelta(minutes=1), timedelta(minutes=1))
    later = first.suspect_nodes[0].at + timedelta(minutes=90)
    assert excluded_until(first.suspect_nodes[0], later) is not None
    again = counted(later, first, [LOST]).suspect_nodes[0]
    end, before = excluded_until(again, later), excluded_until(first.suspect_nodes[0], later)
    assert end is not None
    assert before is not None
    assert end > before


@pytest.mark.parametrize("what", list(Suspicion))
@pytest.mark.parametrize("gap", [timedelta(seconds=5), timedelta(minutes=30), timedelta(minutes=70)])
def test_what_is_charged_to_an_avoided_node_never_shortens_its_exclusion(what: Suspicion, gap: timedelta) -> None:
    first = after(timedelta(0), timedelta(minutes=1))
    (node,) = first.suspect_nodes
    before = excluded_until(node, node.at)
    assert before is not None
    now = node.at + gap
    end = excluded_until(counted(now, first, [Accusation("n1", what)]).suspect_nodes[0], now)
    assert end is not None
    assert end >= before - timedelta(minutes=2)  # points are whole numbers


def test_node_is_avoided_for_three_hours_after_its_last_loss_and_no_longer() -> None:
    node = after(*[timedelta(seconds=11)] * 100).suspect_nodes[0]
    end = excluded_until(node, node.at)
    assert node.points == MOST
    assert end is not None
    assert end - node.at == 3 * HALF_LIFE


def test_list_of_suspects_is_bounded_and_keeps_the_last() -> None:
    restarts = Restarts()
    for number in range(100):
        restarts = counted(NOW, restarts, [Accusation(f"n{number}", Suspicion.REJECTED)])
    assert [node.name for node in restarts.suspect_nodes] == [f"n{number}" for number in range(99, 83, -1)]
    assert parse_status(Status(restarts=restarts).to_wire()).restarts.suspect_nodes == restarts.suspect_nodes


def pod(waiting: str | None = None) -> WorkerPod:
    return WorkerPod("digits-w0-0", "p1", 0, 0, None, PodPhase.PENDING, node="n1", waiting=waiting)


@pytest.mark.parametrize("cause", list(Cause))
def test_only_what_the_script_cannot_have_done_accuses_a_node(cause: Cause) -> None:
    accusations = suspects.of_losses([Loss(0, cause, "ValueError: no", "digits-w0-0", "n1")], {0: pod()})
    expected = {Cause.NODE_LOST, Cause.REJECTED, Cause.START_TIMEOUT}
    assert bool(accusations) == (cause in expected)


@pytest.mark.parametrize(
    ("error", "accuses"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", True),
        ("torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution", True),
        ("Unable to determine the device handle for GPU0: GPU has fallen off the bus.", True),
        ("mce: [Hardware Error]: CPU 3: Machine Check", True),
        ("RuntimeError: CUDA error: device-side assert triggered", False),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", False),
        ("OSError: [Errno 5] Input/output error: '/data/x'", False),  # perhaps of a file system that all nodes share
        ("RuntimeError: No CUDA GPUs are available", False),  # perhaps the image
        ("ValueError: unknown class 'hardware error'", False),
        ("", False),
    ],
)
def test_error_that_names_the_hardware_accuses_the_node(error: str, accuses: bool) -> None:
    by_detail = Loss(0, Cause.ERROR, f"exit code 1: {error}", "digits-w0-0", "n1")
    by_line = Loss(0, Cause.ERROR, "exit code 1", "digits-w0-0", "n1", log_lines=("Traceback", error, "end"))
    wanted = [Accusation("n1", Suspicion.HARDWARE_ERROR)] if accuses else []
    assert suspects.of_losses([by_detail], {}) == suspects.of_losses([by_line], {}) == wanted


def test_what_other_jobs_say_never_takes_away_what_the_job_has_met_itself() -> None:
    snapshot, able = ElasticWorld().snapshot(), dict.fromkeys(NODES, True)
    own = counted(snapshot.now, Restarts(), [LOST])
    own = counted(snapshot.now + timedelta(minutes=1), own, [LOST])
    accused = dict.fromkeys(("n2", "n3"), snapshot.now + HALF_LIFE)

    def excluded(restarts: Restarts, **fleet: Any) -> list[str]:
        seen = replace(snapshot, fleet=Fleet(able, **fleet))
        return sorted(node.name for node in suspects.excluded(seen, restarts, creates=True))

    assert excluded(own) == ["n1"]
    assert excluded(Restarts(), accused=accused) == ["n2", "n3"]
    assert excluded(own, accused={"n2": accused["n2"]}) == ["n1", "n2"]
    assert excluded(own, accused=accused) == ["n1"], "more than half of the nodes"


def test_node_whose_reasons_an_operator_does_not_know_is_shown_with_words_all_the_same() -> None:
    snapshot, able = ElasticWorld().snapshot(), dict.fromkeys(NODES, True)
    own = counted(snapshot.now + timedelta(minutes=1), counted(snapshot.now, Restarts(), [LOST]), [LOST])
    unknown = own.model_copy(update={"suspect_nodes": (own.suspect_nodes[0].model_copy(update={"reasons": ()}),)})
    (node,) = suspects.excluded(replace(snapshot, fleet=Fleet(able)), unknown, creates=True)
    assert node.reasons == ("losses there",)


def test_image_that_cannot_be_pulled_in_time_accuses_no_node() -> None:
    late = Loss(0, Cause.START_TIMEOUT, "not started in 60 s", "digits-w0-0", "n1")
    assert suspects.of_losses([late], {0: pod()}) == [Accusation("n1", Suspicion.START_TIMEOUT)]
    assert suspects.of_losses([late], {0: pod("ErrImagePull: not found")}) == []
    assert suspects.of_losses([late], {0: replace(pod(), starting="init container fetch runs")}) == []
    assert suspects.of_losses([late], {0: replace(pod(), starting="its kubelet has not begun")}) != []
    assert suspects.of_losses([Loss(0, Cause.START_TIMEOUT, "no node", "digits-w0-0")], {}) == []


class Cluster:
    """A job of four workers, at least two, on four nodes with room for two each. The scheduler takes a node that the
    pod does not avoid, if one has room; else one that it avoids."""

    def __init__(self, elastic: bool = True) -> None:
        self.world: Any = ElasticWorld()
        self.world.nodes = {name: NodeView(name, NodeHealth.READY, self.world.now) for name in NODES}
        self.avoided: set[str] = set()
        self.onto_avoided = 0
        self.creations: dict[str, CreatePod] = {}
        if not elastic:
            self.world.do_fixed()
        self.round()
        self.world.do_step("10")
        self.round()

    def plan(self) -> Plan:
        snapshot = self.world.snapshot()
        decided = plan(snapshot)
        self.world.apply(decided)
        self.check(decided)
        for action in decided.actions:
            if isinstance(action, CreatePod):
                self.creations[action.name] = action
                self.place(action)
        return decided

    def place(self, create: CreatePod) -> None:
        affinity = create.body["spec"].get("affinity", {}).get("nodeAffinity", {})
        assert set(affinity) <= {"preferredDuringSchedulingIgnoredDuringExecution"}, "a pod may always be placed"
        terms = affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
        avoided = {v for t in terms for f in t["preference"]["matchFields"] for v in f["values"]}
        used = [p.node for name, p in self.world.pods.items() if name != create.name and not p.finished]
        fits = [n for n in NODES if self.ready(n) and used.count(n) < 2]
        best = sorted(fits, key=lambda n: (n in avoided, used.count(n), n))
        self.world.change(create.name, node=best[0] if best else None, scheduled_at=self.world.now if best else None)
        self.onto_avoided += bool(best) and best[0] in avoided

    def ready(self, name: str) -> bool:
        return bool(self.world.nodes[name].health is NodeHealth.READY)

    def check(self, decided: Plan) -> None:
        nodes = decided.status.excluded_nodes
        names = {node.name for node in nodes}
        assert len(names) == len(nodes)
        usable = {name for name in NODES if self.ready(name)}
        assert not usable or not usable <= names, "a node that is ready is left"
        by_losses = {node.name for node in nodes if node.name not in self.world.faults}
        assert 2 * len(by_losses) <= len(NODES)
        announced = [str(event) for event in decided.events if event.reason == "NodeExcluded"]
        assert len(announced) == len(names - self.avoided)
        assert all(node.reasons and (node.until is None) == (node.name in self.world.faults) for node in nodes)
        self.avoided = names

    def round(self) -> None:
        """Everything starts that can, and the agents form a round."""
        for _ in range(3):
            self.plan()
            for name, pod in list(self.world.pods.items()):
                if pod.node is None and not pod.finished:  # no node had room when it was created
                    self.place(self.creations[name])
            for index in self.world.published().workers:
                waiting = self.world.pods.get(self.world.current(index))
                if waiting is not None and waiting.node is not None and not waiting.finished:
                    self.world.do_ready(str(index))
            self.world.do_form()

    def all_run(self) -> bool:
        current = [self.world.pods.get(self.world.current(i)) for i in self.world.published().workers]
        return all(p is not None and p.node is not None and p.ready for p in current)

    def fault(self, kind: str, node: str) -> None:
        here = [p for p in self.world.pods.values() if p.node == node and not p.finished and p.deleted_at is None]
        match kind:
            case "lost":
                self.world.do_node_lost(node)
            case "back":
                self.world.do_node_back(node)
            case "fault":
                self.world.do_node_fault(node, "KernelDeadlock")
            case "mended":
                self.world.do_node_fault(node)
            case "rejected" | "error" | "killed" | "memory" | "ecc" if here:
                words = {
                    "error": ("1", "ValueError: no", "Error"),
                    "killed": ("137", "", "Error"),
                    "memory": ("137", "", "OOMKilled"),
                    "ecc": ("1", "RuntimeError: CUDA error: uncorrectable ECC error encountered", "Error"),
                }
                if kind == "rejected":
                    self.world.do_reject(str(here[0].index))
                else:
                    self.world.do_fail(str(here[0].index), *words[kind])

    def play(self, kind: str, node: str, seconds: int) -> None:
        self.fault(kind, node)
        self.round()
        self.world.do_advance(str(seconds))
        self.round()
        if self.world.progress.step is not None:
            self.world.do_step(str(self.world.progress.step + 1))
        self.round()


SCRIPTS = ("error", "killed", "memory")
KINDS = (*SCRIPTS, "lost", "back", "fault", "mended", "rejected", "ecc")
events = st.tuples(st.sampled_from(KINDS), st.sampled_from(NODES), st.sampled_from([61, 300, 1800]))


@settings(max_examples=40, deadline=None)
@given(history=st.lists(events, max_size=12), elastic=st.booleans())
def test_exclusion_never_keeps_a_worker_from_a_node_with_room_and_ends_in_time(
    history: list[tuple[str, str, int]], elastic: bool
) -> None:
    cluster = Cluster(elastic)
    cluster.world.spec["recovery"] = {"maxRestarts": 1000, "noProgressLimit": 1000}
    for event in history:
        cluster.play(*event)
    for node in NODES:
        cluster.fault("back", node)
        cluster.fault("mended", node)
    cluster.play("mended", "n1", 1000)
    assert cluster.all_run(), "room for all, so all run"
    cluster.world.do_advance(str(LONGEST.total_seconds()))
    cluster.round()
    assert cluster.world.status.excluded_nodes == ()


@settings(max_examples=30, deadline=None)
@given(history=st.lists(st.tuples(st.sampled_from(SCRIPTS), st.sampled_from(NODES)), min_size=1, max_size=20))
def test_bug_of_the_script_excludes_no_node_however_often_it_happens_on_one(history: list[tuple[str, str]]) -> None:
    cluster = Cluster()
    cluster.world.spec["recovery"] = {"maxRestarts": 1000, "noProgressLimit": 1000}
    for kind, node in history:
        cluster.play(kind, node, 61)
    assert cluster.world.status.restarts.suspect_nodes == cluster.world.status.excluded_nodes == ()


def test_nodes_that_all_have_a_fault_are_not_avoided_and_one_that_is_ready_is_left() -> None:
    cluster = Cluster()
    for node in NODES[:3]:
        cluster.fault("fault", node)
    cluster.play("error", "n1", 61)
    assert cluster.avoided == set(NODES[:3])
    cluster.fault("lost", "n4")
    cluster.play("error", "n1", 61)
    assert cluster.avoided == set()
    assert cluster.all_run()


def test_worker_that_is_rejected_on_every_node_excludes_none_at_the_end() -> None:
    cluster = Cluster()
    for _ in range(3):
        for node in NODES:
            cluster.play("rejected", node, 61)
    assert len(cluster.world.status.restarts.suspect_nodes) >= 3
    assert cluster.world.status.excluded_nodes == ()


def test_node_that_loses_workers_again_and_again_gets_none_while_others_have_room() -> None:
    cluster = Cluster()
    for _ in range(2):
        cluster.play("ecc", "n2", 61)
        cluster.world.do_advance("400")
        missing = [p for p in cluster.world.pods.values() if p.node == "n2"]
        if not missing:  # the scheduler has already taken another one; it comes back as a node does that has most room
            cluster.world.change(cluster.world.current(1), node="n2")
    assert cluster.avoided == {"n2"}
    cluster.play("killed", "n2", 61)
    assert "n2" not in {p.node for p in cluster.world.pods.values()}
    assert cluster.onto_avoided == 0
