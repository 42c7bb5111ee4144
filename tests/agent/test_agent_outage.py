"""A job whose round store is away, and others answer at its address: a release that is taken away and installed again.

Agents and training processes are real, the operator's server is, and at its Service's address there are strangers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.contract.document import decode
from support.agent.agent_job import Agent, Job, regroup, session
from support.rendezvous.agents import until
from support.rendezvous.operator_server import OperatorServer, Pod
from support.rendezvous.strangers import STRANGERS, Stranger

pytestmark = pytest.mark.timeout(300)
TTL = 3  # seconds of a lease: shorter than either outage
ANSWERS = ("404 of a server that knows no such path", "200 with a page", "200 with other JSON", "nothing")


@pytest.fixture
def operators(tmp_path: Path) -> Iterator[OperatorServer]:
    server = OperatorServer(tmp_path)
    yield server
    server.stop()


# The long one is as long as an installation by hand; both outlast each lease and each patience of a call.
@pytest.mark.long
@pytest.mark.parametrize("seconds", [12, 90])
def test_world_trains_on_while_strangers_answer_for_its_round_store_and_nothing_is_charged(
    operators: OperatorServer, job: Callable[..., Job], tmp_path: Path, seconds: float
) -> None:
    leader = operators.start()
    until(lambda: operators.leads(leader))
    service = Stranger(STRANGERS[ANSWERS[0]])
    service.operator = leader.url
    owner = operators.create_job()
    run = job(*session(tmp_path, pause=0.02), nodes="2:2")

    def start(pod: Pod) -> Agent:
        where = ("--rdzv-backend=everstep", f"--rdzv-endpoint={service.url}")
        (agent,) = run.start(conf=f"last_call=20,ttl={TTL},token_file={pod.token_file}", flags=where)
        return agent

    began = time.monotonic()
    pods = [operators.create_pod(owner, index) for index in range(2)]
    agents = [start(pod) for pod in pods]
    regroup(run, agents, began)
    store = operators.store(pods[0])
    before = decode(store.read().document or b"")
    trainers = [agent.trainers() for agent in agents]

    operators.kill(leader)
    service.operator, away = "", time.monotonic()
    for says in itertools.cycle(ANSWERS):
        service.says, asked, now = STRANGERS[says], service.asked, time.monotonic()
        run.until(lambda asked=asked: service.asked > asked, f"no agent asked while it was answered {says}")
        regroup(run, agents, now)
        if time.monotonic() - away > seconds:
            break
    assert [agent.process.poll() for agent in agents] == [None, None]
    assert [agent.trainers() for agent in agents] == trainers

    # The store forgets nothing while it is away: an agent that joins waits for it, whatever is answered.
    at = run.kill(agents[1])
    pod = operators.create_pod(owner, 1, incarnation=1)
    agents[1] = start(pod)
    for says in ANSWERS:
        service.says, asked = STRANGERS[says], service.tokens[pod.token.lower()]
        more = lambda asked=asked: service.tokens[pod.token.lower()] > asked + 1  # noqa: E731
        run.until(more, f"the new agent did not ask again while it was answered {says}")
    assert [agent.process.poll() for agent in agents] == [None, None], "\n".join(a.log.read_text() for a in agents)

    leader = operators.start()
    until(lambda: operators.leads(leader))
    service.operator = leader.url
    regroup(run, agents, at)
    store = operators.store(pods[0], leader.url)
    after = decode(store.read().document or b"")
    assert not [setback for setback in after.history if setback.charged]
    assert after.restarts == 0
    assert after.round > before.round
    assert agents[0].trainers() == trainers[0]
    service.stop()
    assert run.differing() == {}
