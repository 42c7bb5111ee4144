"""An etcd that is put back to an older state of its own, as from a copy of its volume."""

from __future__ import annotations

import base64
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from everstep.checkpoint.format.manifest import OpenRecord
from everstep.checkpoint.log.decisions import Append, Claim, Head, Refuse, advance, decide_open
from everstep.contract.document import Sizes
from everstep.membership.backends.etcd import EtcdStore
from everstep.membership.backends.etcd_http import Gateway
from everstep.membership.store import View
from everstep.membership.world_state import Broken, Growing, Round, Whole
from support.rendezvous.agents import LIMIT, QUICK, Crew, crew, until
from support.rendezvous.etcd_server import EtcdCluster

SETTINGS = replace(QUICK, ttl=4.0)  # those who died are in the copy, with their leases


@pytest.fixture
def cluster(etcd_folder: Path) -> Iterator[EtcdCluster]:
    made = EtcdCluster(etcd_folder / "etcd", 1)
    made.start()
    yield made
    made.stop()


def copy(cluster: EtcdCluster) -> None:
    cluster.members[0].kill()
    shutil.copytree(cluster.folder / "m0", cluster.folder / "copy")
    cluster.start()


def put_back(cluster: EtcdCluster) -> None:
    cluster.members[0].kill()
    shutil.rmtree(cluster.folder / "m0")
    (cluster.folder / "copy").rename(cluster.folder / "m0")
    cluster.start()


def lived(cluster: EtcdCluster, agents: Crew, names: str) -> dict[str, Round]:
    """These agents' last round, of which the copy knows nothing."""
    agents.start(names)
    agents.join(names)
    copy(cluster)
    for _ in range(4):
        rounds = agents.join(names)
    return rounds


def told(agents: Crew, name: str) -> bool:
    return "lost" in getattr(agents.drivers[name].world_state(), "why", "")


@pytest.mark.long
@pytest.mark.parametrize("stay", ["ab", "a"], ids=["all stay", "one stays"])
def test_agents_of_an_etcd_that_was_put_back_meet_in_a_newer_round(cluster: EtcdCluster, stay: str) -> None:
    with crew(lambda: EtcdStore(Gateway(cluster.urls), "job"), Sizes(2, 2), SETTINGS) as agents:
        before = lived(cluster, agents, "ab")["a"]
        for name in set("ab") - set(stay):
            agents.drivers.pop(name).stop()
        put_back(cluster)
        for name in stay:
            until(lambda n=name: told(agents, n))  # type: ignore[misc]
        names = stay + "c"[: 2 - len(stay)]
        for name in names[len(stay) :]:
            agents.add(name)
        rounds = agents.join(names)
        assert len({(r.number, r.members, r.rendezvous) for r in rounds.values()}) == 1
        now = rounds["a"]
        assert now.number > before.number
        head = advance(Head(), opened(Head(), before))
        assert opened(head, now).round == now.number
        assert all(until(lambda d=d: d.world_state() == Whole()) for d in agents.drivers.values())  # type: ignore[misc]
        agents.drivers[names[1]].stop()  # as a crash
        assert isinstance(agents.drivers["a"].wait(LIMIT), Broken), "expirations are heard of, as before"


@pytest.mark.long
def test_member_that_dies_after_etcd_was_put_back_is_missed(cluster: EtcdCluster) -> None:
    with crew(lambda: EtcdStore(Gateway(cluster.urls), "job"), Sizes(1, 2), SETTINGS) as agents:
        before = lived(cluster, agents, "ab")["a"]
        put_back(cluster)
        agents.drivers.pop("b").stop()
        until(lambda: isinstance(agents.drivers["a"].world_state(), Broken))
        now = agents.join("a")["a"]
        assert [m.agent for m in now.members] == ["a"]
        assert now.number > before.number


def test_agent_that_comes_after_etcd_was_put_back_meets_those_who_live(cluster: EtcdCluster) -> None:
    with crew(lambda: EtcdStore(Gateway(cluster.urls), "job"), Sizes(2, 3), SETTINGS) as agents:
        before = lived(cluster, agents, "ab")["a"]
        put_back(cluster)
        agents.add("c")
        newcomer = agents.joining("c")["c"]
        for name in "ab":
            until(lambda n=name: told(agents, n))  # type: ignore[misc]
        rounds = agents.join("ab")
        if len(rounds["a"].members) == 2:  # they were faster
            until(lambda: isinstance(agents.drivers["a"].world_state(), Growing))
            rounds = agents.join("ab")
        joined = newcomer.result(LIMIT)
        assert joined.number == rounds["a"].number > before.number
        assert {m.agent for m in joined.members} == set("abc")


def opened(head: Head, found: Round) -> OpenRecord:
    decision = decide_open(head, Claim("w", found.number, "", found.world_size, "", 0, found.rendezvous))
    assert isinstance(decision, Append), decision
    assert isinstance(decision.record, OpenRecord)
    return decision.record


@pytest.mark.long
def test_run_whose_agents_are_all_new_is_told_to_take_another_id_which_helps(cluster: EtcdCluster) -> None:
    job = "job"
    with crew(lambda: EtcdStore(Gateway(cluster.urls), job), Sizes(2, 2), SETTINGS) as agents:
        head = advance(Head(), opened(Head(), lived(cluster, agents, "ab")["a"]))
        for name in "ab":
            agents.drivers.pop(name).stop()
        put_back(cluster)
        for name in "cd":
            agents.add(name)
        now = agents.join("cd")["c"]
        claim = Claim("w", now.number, "", now.world_size, "", 0, now.rendezvous)
        decision = decide_open(head, claim)
        assert isinstance(decision, Refuse)
        assert "start the run under a new rendezvous id" in decision.reason
    job = uuid.uuid4().hex
    with crew(lambda: EtcdStore(Gateway(cluster.urls), job), Sizes(2, 2), SETTINGS) as agents:
        opened(head, agents.start("ef")["e"])


def test_document_tells_of_an_older_state_where_others_have_written_since(cluster: EtcdCluster) -> None:
    """Or where the revision was raised, as `etcdutl snapshot restore --bump-revision` does."""
    store = EtcdStore(Gateway(cluster.urls), "job")
    first = store.compare_and_swap(0, b"old") or 0
    copy(cluster)
    second = store.compare_and_swap(first, b"new") or 0
    seen = store.read()
    assert seen == View(b"new", second, seen.expirations)
    put_back(cluster)
    for _ in range(5):
        cluster.post("/v3/kv/put", {"key": base64.b64encode(b"another job's").decode()})
    found = store.watch(seen, LIMIT)
    assert found == View(b"old", first, found.expirations, 1)
    assert found.expirations > seen.expirations
    store.close()
