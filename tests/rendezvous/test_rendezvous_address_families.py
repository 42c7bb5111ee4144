"""Clusters with IPv6 alone, and with both families: the operator is reached by either, and sends agents on by URLs."""

from __future__ import annotations

import asyncio
import http.client
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.contract.addresses import host_and_port
from everstep.contract.messages import REPORT_PATH, Phase, Report
from everstep.membership.backends.operator_calls import OperatorCalls, base_url
from everstep.membership.identity import own_address
from everstep.reporting.report import post
from everstep_operator.endpoint.auth import LeaderAt, LeaderHere, LeaderLocation, RequestAuth
from everstep_operator.endpoint.server import HttpServer
from everstep_operator.endpoint.token_claims import PodIdentity
from everstep_operator.runtime.leader import address_of
from everstep_operator.runtime.leader_probe import _reach
from everstep_operator.settings import OperatorSettings
from support import TESTS
from support.agent.agent_job import CONF, Job, session
from support.operator.report_server import report_server
from support.operator.tokens import POD, Authority, Reviewer
from support.rendezvous.agents import until
from support.rendezvous.operator_server import OperatorServer

BODY = Report(Phase.TRAIN, rank=0, world_size=2, at=100.0, step=5).encode()


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("10.0.0.1", "10.0.0.1:80"),
        ("fd00::1", "[fd00::1]:80"),
        ("[fd00::1]", "[fd00::1]:80"),
        ("a.b.svc", "a.b.svc:80"),
    ],
)
def test_host_and_port_are_a_part_of_a_url(host: str, text: str) -> None:
    assert host_and_port(host, 80) == text
    assert base_url(f"http://{text}", 8080) == f"http://{text}"


def alive(host: str, port: int) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=10)
    connection.request("GET", "/healthz")
    return connection.getresponse().status


async def test_operator_listens_on_both_families_at_one_port() -> None:
    async with report_server(RequestAuth(Reviewer(Authority()).cache(), LeaderHere), host="") as server:
        for host in ("127.0.0.1", "::1"):
            assert await asyncio.to_thread(alive, host, server.port) == 200


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_report_and_call_at_a_follower_reach_the_leader_that_its_lease_names(
    address: str, tmp_path: Path
) -> None:
    await follow(address, tmp_path / "token")


async def follow(address: str, token_file: Path) -> None:
    """A report and a call go to a follower, which knows the leader by the identity in the Lease."""
    reviewer, accepted = Reviewer(Authority()), []
    token = reviewer.issue(POD)
    token_file.write_text(token)  # noqa: ASYNC240
    clock = asyncio.get_running_loop().time

    def accept(who: PodIdentity, _: Report) -> None:
        accepted.append(who)

    def serve(leadership: Callable[[], LeaderLocation]) -> HttpServer:
        return report_server(RequestAuth(reviewer.cache(monotonic=clock), leadership), accept, host="")

    async with serve(LeaderHere) as leader, asyncio.timeout(60):
        variables = {"EVERSTEP_POD_NAME": "op-1", "EVERSTEP_POD_IP": address, "EVERSTEP_PORT": str(leader.port)}
        named = address_of(OperatorSettings.from_env(variables).identity)
        assert named is not None
        made = await _reach(named)
        assert not isinstance(made, str), made
        made[1].close()
        async with serve(lambda: LeaderAt(f"http://{named}")) as follower:
            url = f"http://{host_and_port(address, follower.port)}"
            await asyncio.to_thread(post, url + REPORT_PATH, token, BODY)
            calls = OperatorCalls(base_url(url, 8080), str(token_file))
            reply = await asyncio.to_thread(calls.call, "POST", REPORT_PATH, expect=(204,), body=BODY)
            calls.close()
    assert reply.status == 204
    assert accepted == [POD] * 2
    assert own_address((url,)) == address


def in_a_network_of_ipv6_alone(call: str, seconds: float = 100) -> subprocess.CompletedProcess[str]:
    """`call`, of a function of this module, in a network of its own, from which IPv4 is taken away."""
    script = (
        "import asyncio, pathlib, socket\n"
        "from rendezvous import test_rendezvous_address_families as module\n"
        "try:\n"
        "    socket.create_connection(('127.0.0.1', 1))\n"
        "except ConnectionRefusedError:\n"
        "    raise SystemExit('IPv4 is there')\n"
        "except OSError:\n"
        "    pass\n"
        f"{call}\n"
        "print('done')\n"
    )
    network = 'ip link set lo up && ip -4 addr flush dev lo && exec "$0" -c "$1"'
    return subprocess.run(
        ["unshare", "--net", "sh", "-c", network, sys.executable, script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))},
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip


def test_loopback_with_ipv6_alone_is_enough(tmp_path: Path) -> None:
    token_file = str(tmp_path / "token")
    done = in_a_network_of_ipv6_alone(f"asyncio.run(module.follow('::1', pathlib.Path({token_file!r})))")
    assert done.stdout == "done\n", done.stderr


def train_on_two_agents(folder: Path) -> None:
    """Five steps by `everstep-run`; the operator that keeps their rounds is here too."""
    operators = OperatorServer(folder)
    try:
        leader = operators.start(8080, host="::1")  # nobody else is in this network
        until(lambda: operators.leads(leader))
        owner = operators.create_job()
        with Job(folder, leader.url, *map(str, session(folder, steps=5)), nodes="2:2") as job:
            for index in range(2):
                token_file = operators.create_pod(owner, index).token_file
                job.start(conf=f"{CONF},token_file={token_file}", flags=["--rdzv-backend=everstep"])
            expect_trained(job, 5)
    finally:
        operators.stop()


def train_on_one_agent(folder: Path) -> None:
    """Two processes of an agent that has no round store."""
    with Job(folder, "", *map(str, session(folder, steps=5)), nodes="1") as job:
        job.start(flags=["--standalone", "--nproc-per-node=2"])
        expect_trained(job, 5)


def expect_trained(job: Job, steps: int) -> None:
    codes = job.codes()
    assert not any(codes), (codes, [agent.log.read_text()[-3000:] for agent in job.agents])
    taken = [job.steps(int(path.stem)) for path in job.folder.glob("*.jsonl")]
    assert [[(e["step"], e["world"]) for e in one] for one in taken] == [[(n, 2) for n in range(1, steps + 1)]] * 2
    assert job.differing() == {}


@pytest.mark.long
@pytest.mark.parametrize("function", [train_on_two_agents, train_on_one_agent])
def test_processes_train_where_the_loopback_has_ipv6_alone(function: Callable[[Path], None], tmp_path: Path) -> None:
    done = in_a_network_of_ipv6_alone(f"module.{function.__name__}(pathlib.Path({str(tmp_path)!r}))", 115)
    assert done.stdout.endswith("done\n"), done.stdout[-3000:] + done.stderr[-6000:]
