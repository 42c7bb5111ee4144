"""A machine that falls silent is missed by what the kernels of others say, and no lease is waited out."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from everstep.contract.document import MAX_BYTES
from everstep.contract.rounds import DOCUMENT_PATH, EXPIRATIONS_HEADER
from everstep.membership.backends.operator_calls import Limits, OperatorCalls, open_connection
from everstep.membership.errors import StoreUnavailable
from everstep.membership.world_state import Growing, Whole
from support.network.netspaces import Machines
from support.network.silent_machines import LOST, LostNode
from support.rendezvous.agents import LIMIT, until
from support.rendezvous.operator_server import OperatorServer

pytestmark = pytest.mark.timeout(180)


@pytest.mark.long
def test_two_workers_go_on_when_the_leader_and_the_third_fall_silent_together(tmp_path: Path) -> None:
    """The operator's Lease and those of the agents last longer than any wait here: nobody waits for the end of one.

    The survivors decide, by what their kernels say: one reports that it does not reach the third, which ends the round,
    and the other does too, unless it has left the round by then. `benchmarks/silent_node.py` has the seconds, and their
    goal.
    """
    with LostNode(tmp_path, lease_seconds=int(LIMIT) + 6, ttl=2 * LIMIT) as node:
        took = node.go_on(node.cut())
        print(f"told after {took['heard']:.1f} s, in the next round after {took['formed']:.1f} s")
        assert node.operators.leads(node.spare)
        document = node.document()
        reports = {(r.low, r.high) for r in document.reports if r.active}
        assert reports
        assert reports <= {("agent-0", "agent-2"), ("agent-1", "agent-2")}
        assert [member.agent for member in document.members] == ["agent-0", "agent-1"]
        (setback,) = document.history
        assert setback.why in ("agent-0 does not reach agent-2", "agent-1 does not reach agent-2")
        assert not setback.charged


@pytest.mark.long
def test_two_workers_go_on_when_the_leader_and_the_third_are_frozen_together(tmp_path: Path) -> None:
    """Both survivors are in the next round: neither is given up because its call hung at the frozen leader, which takes
    half of the connections to the Service. What thaws finds that it is out."""
    with LostNode(tmp_path) as node:
        took = node.go_on(node.freeze())
        print(f"told after {took['heard']:.1f} s, in the next round after {took['formed']:.1f} s")
        assert node.operators.leads(node.spare)
        document = node.document()
        assert document.round == 2
        assert [member.agent for member in document.members] == ["agent-0", "agent-1"]
        assert [(setback.agent, setback.charged) for setback in document.history] == [("agent-2", False)]
        node.thaw()
        until(lambda: node.leader.operator.elector.other_holder_address() == node.spare.url.removeprefix("http://"))
        assert not node.operators.leads(node.leader)
        assert node.operators.leads(node.spare)
        until(lambda: [member.agent for member in node.document().joining] == ["agent-2"])
        assert node.document().round == 2, "it waits, and ends no round"
        assert all(isinstance(driver.world_state(), Whole | Growing) for driver in node.drivers)


def test_call_to_a_machine_that_falls_silent_ends_long_before_its_answer_is_due(tmp_path: Path) -> None:
    with Machines("here", LOST) as machines:
        operators = OperatorServer(tmp_path)
        try:
            leader = operators.start(host=machines.addresses[LOST], inside=lambda: machines.inside(LOST))
            until(lambda: operators.leads(leader))
            pod = operators.create_pod(operators.create_job(), 0)
            ended: list[Exception] = []

            def watch() -> None:
                with machines.inside("here"):
                    calls = OperatorCalls(leader.url, str(pod.token_file), limits=Limits(tries=1))
                    seen = calls.call("GET", DOCUMENT_PATH, expect=(200, 204), limit=MAX_BYTES).headers
                    path = f"{DOCUMENT_PATH}?version=0&lapses={seen[EXPIRATIONS_HEADER]}&wait=600"
                    waits.set()
                    try:
                        calls.call("GET", path, expect=(304,), limit=MAX_BYTES, reply=600.0)
                    except StoreUnavailable as e:
                        ended.append(e)

            waits = threading.Event()
            thread = threading.Thread(target=watch, daemon=True)
            thread.start()
            assert waits.wait(LIMIT)
            until(lambda: leader.operator.rounds.watching == 1)
            machines.drop(LOST, "here")
            machines.drop("here", LOST)
            until(lambda: ended)
        finally:
            operators.stop()


@pytest.mark.long
def test_connection_is_made_to_the_machine_that_answers_of_two_behind_one_address(tmp_path: Path) -> None:
    """Of a Service with a lost node each attempt gets either."""
    with LostNode(tmp_path) as node:
        node.cut()
        with node.machines.inside("left"):
            began = time.monotonic()
            for _ in range(10):
                try:
                    open_connection("10.231.7.200", 8080, 5.0).close()
                except TimeoutError:
                    pytest.fail(f"20 attempts met the lost one, {time.monotonic() - began:.1f} s in")
