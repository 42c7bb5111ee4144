"""What a node that comes and goes costs an elastic job, and what many losses at once cost it: counted in rounds."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.contract.document import Document, Member, Sizes
from everstep.membership.commands import Form, Join, Leave, Waited
from everstep.membership.machine import Rejected, apply
from everstep_local.plan.simulation.agents import ElasticWorld
from everstep_operator.api.conditions import ConditionType
from everstep_operator.plan.snapshot import NodeHealth
from everstep_operator.plan.state.lost_nodes import LONGEST, STEADY

TICK = 5  # seconds between two looks
STARTS = 5.0  # seconds from a pod's node until its agent waits for a place
FLAPPING = "n2"


class Cluster:
    """A job of four workers, two of them on a node that comes and goes. Agents form a round as soon as they may."""

    def __init__(self) -> None:
        self.world: Any = ElasticWorld()
        self.rounds = 0
        self.sizes: list[int] = []
        for line in ("settle", "ready 0 1 2 3", "keep-processes", "form", "reconcile", "step 10", "reconcile"):
            self.world.run(line)

    @property
    def _is_up(self) -> bool:
        return bool(self.world.nodes[FLAPPING].health is NodeHealth.READY)

    def tick(self) -> None:
        world = self.world
        world.do_advance(str(TICK))
        for index in world.published().workers:
            pod = world.pods.get(world.current(index))
            if pod is None:
                continue
            if self._is_up and pod.node is None:
                world.do_schedule(FLAPPING, str(index))
            elif pod.node is not None and not pod.ready and self._age(pod.scheduled_at or pod.created_at) >= STARTS:
                world.do_ready(str(index))
        self._agents()
        world.do_reconcile()
        for pod in list(world.pods.values()):
            if not self._is_up and pod.node == FLAPPING and pod.started_at is None:
                world.do_unschedulable(str(pod.index))
        world.do_reconcile()

    def _age(self, since: datetime) -> float:
        return float((self.world.now - since).total_seconds())

    def _agents(self) -> None:
        """Survivors go on without a member that is gone, and take in who waits, if the sizes allow it."""
        world = self.world
        alive = {(p.index, p.incarnation) for p in world.pods.values() if p.ready and self._reaches(p)}
        members = set(world.view.members)
        waiting = {(i, n) for i, n in alive - members if world.published().workers.get(i) is not None}
        allowed = world.view.sizes.largest(len(members & alive) + len(waiting))
        if members <= alive and allowed <= len(members):
            world.view = replace(world.view, joining=tuple(sorted(i for i, _ in waiting)))
            return
        before = world.view.round
        world.do_form(*(str(i) for i, n in members - alive))
        self.rounds += world.view.round > before
        self.sizes.append(len(world.view.members))
        world.do_advance("1")
        world.do_step(str((world.progress.step or 0) + 1))

    def _reaches(self, pod: Any) -> bool:
        return self._is_up or pod.node != FLAPPING

    def pass_(self, seconds: int) -> None:
        for _ in range(0, seconds, TICK):
            self.tick()

    def until_full(self) -> None:
        for _ in range(0, int(LONGEST.total_seconds()) + 30, TICK):
            if len(self.world.view.members) == 4:
                return
            self.tick()

    def flap(self, up: int, down: int) -> None:
        self.world.do_node_lost(FLAPPING)
        self.pass_(down)
        self.world.do_node_back(FLAPPING)
        self.pass_(up)


@settings(max_examples=10, deadline=None)
@given(up=st.integers(1, 150), down=st.integers(4, 60), flaps=st.integers(2, 6))
def test_flapping_node_costs_two_rounds_and_not_two_a_flap(up: int, down: int, flaps: int) -> None:
    cluster = Cluster()
    cluster.pass_(60)
    assert cluster.rounds == 0
    for _ in range(flaps):
        cluster.flap(up, down)
    # A node that stays for longer than the job waits is taken for steady, and the next wait is twice as long.
    deceived = len([k for k in range(8) if STEADY.total_seconds() * 2**k <= up + STARTS + TICK])
    cluster.until_full()
    assert cluster.rounds <= 2 + 2 * deceived
    assert cluster.sizes[-1] == 4, "it grows again when the node stays"
    assert min(cluster.sizes) >= 2
    assert cluster.world.status.condition(ConditionType.READY).reason == "Running"
    assert cluster.world.status.restarts.user_code == 0


def test_first_loss_of_a_node_that_stays_away_delays_no_worker_on_another() -> None:
    cluster = Cluster()
    cluster.pass_(60)
    cluster.world.do_node_lost(FLAPPING)
    cluster.pass_(TICK)
    cluster.world.do_schedule("n1", "1", "3")
    cluster.pass_(int(STARTS) + 3)
    assert cluster.sizes == [2, 4]


def test_job_of_a_fixed_size_waits_for_no_node_to_be_steady() -> None:
    cluster = Cluster()
    cluster.world.do_fixed()
    cluster.pass_(5)
    cluster.flap(10, 5)
    assert cluster.sizes[-1] == 4


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(40)), lost=st.integers(1, 30), data=st.data())
def test_many_members_lost_at_once_are_one_round(order: list[int], lost: int, data: st.DataObject) -> None:
    sizes = Sizes(10, 40)
    document = Document(sizes)
    members = [Member(i, f"agent-{i}") for i in range(40)]
    for member in members:
        document = _applied(document, Join(member, sizes))
    document = _applied(document, Form("agent-0", 0, Waited.NOTHING))
    dead, alive = order[:lost], order[lost:]
    ends = [Leave(f"agent-{i}", "its lease expired") for i in dead]
    commands = data.draw(st.permutations([*ends, *(Join(members[i], sizes) for i in alive)]))
    rounds = 1
    for command in commands:
        document = _applied(document, command)
        for agent in [member.agent for member in document.joining][:1]:
            formed = apply(document, Form(agent, document.round, Waited.NOTHING))
            document = document if isinstance(formed, Rejected) else formed
        rounds = max(rounds, document.round)
    assert rounds == 2
    assert len(document.members) == 40 - lost


def _applied(document: Document, command: Any) -> Document:
    after = apply(document, command)
    assert not isinstance(after, Rejected), f"{command}: {after.reason}"
    return after


def test_thirty_pods_lost_at_once_are_one_incident() -> None:
    world: Any = ElasticWorld()
    world.spec.update(replicas=40, elastic={"minReplicas": 10, "maxReplicas": 40})
    for line in ("settle", f"ready {' '.join(map(str, range(40)))}", "form", "reconcile", "step 10", "reconcile"):
        world.run(line)
    world.do_advance("60")
    lost = range(10, 40)
    published = []
    for group in (lost[:7], lost[7:20], lost[20:]):  # their ends are seen in three passes
        for index in group:
            world.do_fail(str(index), "137")
        world.do_reconcile()
        published.append(str(world.published()))
        world.do_advance("1")
    world.run("form")
    world.do_reconcile()
    assert world.status.restarts.total == 1
    assert len(world.status.recoveries) == 1
    assert len(world.view.members) == 10
    assert published[-1] == "0-9@0 10-39@1"
