"""Workers that reach real replicas of the operator by TLS: redirects, renewed certificates, other authorities."""

from __future__ import annotations

import asyncio
import gc
import http.client
import ssl
from asyncio.sslproto import SSLProtocol
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from everstep.contract import env
from everstep.contract.document import MAX_BYTES, Sizes
from everstep.contract.messages import REPORT_PATH, Phase, Report
from everstep.contract.rounds import DOCUMENT_PATH
from everstep.membership.backends.configuration import (
    ConfigurationInvalid,
    operator_calls,
    read,
    read_operator,
)
from everstep.membership.errors import StoreUnavailable
from everstep.membership.world_state import Whole
from everstep.reporting.report import PostError, Reporter, post
from everstep_operator.endpoint.certificates import Certificates
from everstep_operator.endpoint.server import HttpServer, ServerOptions, add_alive
from everstep_operator.endpoint.tls_connections import BUFFER
from everstep_operator.runtime.clock import SystemClock
from support.network.ports import Ports
from support.operator.authorities import Authority, put
from support.rendezvous.agents import EXPIRING, Crew, until
from support.rendezvous.operator_server import OperatorServer, Pod, Replica

ASK = ("GET", DOCUMENT_PATH)


class Place:
    """A Secret's folder, and operators with it. Replicas have one TLS port at different addresses, as in pods."""

    def __init__(self, server: OperatorServer, folder: Path, port: int) -> None:
        self.server, self.folder, self._port = server, folder, port
        self.authority = Authority()
        self.renew(self.authority)

    def renew(self, by: Authority, ca: bytes = b"") -> None:
        chain, key = by.issue("localhost")
        put(self.folder, tls_crt=chain, tls_key=key, ca_crt=ca or by.pem)
        for replica in self.server.replicas:
            assert replica.operator.certificates is not None
            self.server.loop.call_soon_threadsafe(replica.operator.certificates.refresh)

    def start(self, host: str = "127.0.0.1", **settings: str) -> Replica:
        tls = {"EVERSTEP_TLS_DIR": str(self.folder), "EVERSTEP_TLS_PORT": str(self._port), **settings}
        return self.server.start(host=host, tls=tls)

    def pod(self, index: int = 0) -> Pod:
        return self.server.create_pod(self.server.create_job(f"job-{index}"), index)


@pytest.fixture
def place(operators: OperatorServer, tmp_path: Path) -> Any:
    ports = Ports()
    yield Place(operators, tmp_path / "secret", ports.take())
    ports.close()


def looks(store: Any) -> int:
    """The status of the answer to a look at the document."""
    return int(store.call(*ASK, expect=(200, 204), limit=MAX_BYTES).status)


def test_agents_and_reports_reach_the_leader_through_a_follower_and_trust_it_by_the_services_name(place: Place) -> None:
    server, ca = place.server, place.authority.pem.decode()
    leader = place.start("127.0.0.2")
    until(lambda: server.leads(leader))
    follower = place.start()  # at the address of localhost
    until(lambda: follower.operator.elector.holder_address() is not None)
    job, pods = server.create_job(), []

    def store() -> Any:
        pods.append(server.create_pod(job, len(pods)))
        return server.store(pods[-1], follower.tls_url, ca=ca)

    agents = Crew(store, Sizes(2, 3), EXPIRING)
    try:
        agents.start("ab")
        assert agents.drivers["a"].wait(3.5) == Whole()  # longer than a lease: it was renewed
    finally:
        agents.stop()
    reporter = Reporter(follower.tls_url + REPORT_PATH, str(pods[0].token_file), ca=ca, round=1)
    reporter.step(7)
    assert reporter.flush(10)
    report = Report(Phase.TRAIN, 0, 1, 0.0, step=8).encode()
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        post(follower.tls_url + REPORT_PATH, pods[0].token, report)


def test_renewed_certificate_and_another_authority_are_taken_by_who_trusts_both(place: Place) -> None:
    replica = place.start()
    until(lambda: place.server.leads(replica))
    pod, next_authority = place.pod(), Authority("next")
    bundle = place.authority.pem + next_authority.pem

    def looks_with(trusted: bytes) -> int:
        """Over a connection of its own."""
        return looks(place.server.calls(pod, replica.tls_url, ca=trusted.decode()))

    connected = place.server.calls(pod, replica.tls_url, ca=place.authority.pem.decode())
    assert trusted_by_pods(replica) == place.authority.pem
    assert looks(connected) == looks_with(place.authority.pem) == looks_with(bundle) == 204
    place.renew(place.authority, bundle)
    until(lambda: trusted_by_pods(replica) == bundle)
    assert looks_with(place.authority.pem) == looks_with(bundle) == 204
    place.renew(next_authority, next_authority.pem)
    until(lambda: trusted_by_pods(replica) == next_authority.pem)
    with pytest.raises(StoreUnavailable, match=f"TLS: .*{env.CA_CERTIFICATES}"):
        looks_with(place.authority.pem)
    assert looks(connected) == looks_with(bundle) == 204  # the first connection is still open


def trusted_by_pods(replica: Replica) -> bytes:
    return replica.operator.reconciler._settings.ca.encode()


def test_pod_gets_the_authority_and_its_agent_reads_it_from_its_environment(place: Place) -> None:
    replica = place.start()
    until(lambda: place.server.leads(replica))
    environ = {
        env.REPORT_URL: replica.tls_url + REPORT_PATH,
        env.TOKEN_FILE: str(place.pod().token_file),
        env.CA_CERTIFICATES: place.authority.pem.decode(),
    }
    assert looks(operator_calls(read_operator({}, "", environ))) == 204
    with pytest.raises(StoreUnavailable, match="TLS"):
        looks(operator_calls(read_operator({}, "", {**environ, env.CA_CERTIFICATES: Authority().pem.decode()})))


def test_calls_without_tls_are_taken_until_a_value_ends_that(place: Place) -> None:
    replica = place.start()
    until(lambda: place.server.leads(replica))
    pod = place.pod()
    assert looks(place.server.calls(pod, replica.url)) == 204
    place.server.kill(replica)

    strict = place.start(EVERSTEP_PLAIN_CALLS="false")
    until(lambda: place.server.leads(strict))
    with pytest.raises(StoreUnavailable, match=r"426: calls are taken by TLS alone, at https://localhost: a pod of"):
        looks(place.server.calls(pod, strict.url))
    with pytest.raises(PostError, match="426: calls are taken by TLS alone"):
        post(strict.url + REPORT_PATH, pod.token, b"{}")
    connection = http.client.HTTPConnection(urlsplit(strict.url).netloc, timeout=10)
    connection.request("GET", "/healthz")  # the other replicas look there
    assert connection.getresponse().status == 200
    connection.close()
    assert looks(place.server.calls(pod, strict.tls_url, ca=place.authority.pem.decode())) == 204


def test_address_without_tls_is_refused_where_tls_is_asked_for(place: Place) -> None:
    environ = {env.REPORT_URL: f"http://everstep.svc{REPORT_PATH}", env.TOKEN_FILE: "/token"}
    assert read_operator({}, "", environ).urls == ("http://everstep.svc:80",)
    for config in ({"ca_file": "/ca.pem"}, {"protocol": "https"}):
        with pytest.raises(
            ConfigurationInvalid, match=r"http://everstep.svc:80 is not encrypted, and ca_file, protocol"
        ):
            read_operator(config, "", environ)
    trusted = {**environ, env.CA_CERTIFICATES: place.authority.pem.decode()}
    assert read_operator({}, "operator:8443", trusted).urls == ("https://operator:8443",)
    with pytest.raises(ConfigurationInvalid, match="http://b:2379 is not encrypted"):
        read({"user": "root", "password_file": "/password"}, "https://a:2379,http://b:2379")


async def test_handshakes_that_fail_and_connections_that_wait_keep_little(place: Place) -> None:
    """Collections are rare in the operator: a cycle that each failure left grew without a bound that counts."""
    chain, key = place.authority.issue("localhost")
    put(place.folder, tls_crt=chain, tls_key=key)
    found = Certificates(str(place.folder), "localhost", SystemClock(), lambda _ca, _ends: None)
    gc.collect()
    gc.disable()
    try:
        async with HttpServer([add_alive], ServerOptions("127.0.0.1", 0, tls=found.context)) as server:
            for _ in range(20):
                with pytest.raises(ssl.SSLError):
                    await asyncio.open_connection(
                        "127.0.0.1", server.port, ssl=ssl.create_default_context(), server_hostname="localhost"
                    )
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)  # as a check of the port does
                writer.close()
            async with asyncio.timeout(20):
                while (left := kept()) > 0:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert left == 0
            trust = ssl.create_default_context(cadata=place.authority.pem.decode())
            _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trust, server_hostname="localhost")
            buffers = {len(vars(each)["_ssl_buffer"]) for each in gc.get_objects() if type(each) is SSLProtocol}
            assert buffers == {BUFFER}
            writer.close()
    finally:
        gc.enable()


def kept() -> int:
    """Protocols of the server's side; those of the clients here have failed too."""
    return sum(type(each) is SSLProtocol and each._server_side for each in gc.get_objects())


def test_port_of_the_other_kind_is_named(place: Place) -> None:
    replica = place.start()
    until(lambda: place.server.leads(replica))
    pod, ca = place.pod(), place.authority.pem.decode()
    with pytest.raises(StoreUnavailable, match="that port does not speak TLS: write http://, or its port for TLS"):
        looks(place.server.calls(pod, f"https://localhost:{replica.port}", ca=ca))
    with pytest.raises(StoreUnavailable, match="if that port speaks TLS, write https://"):
        looks(place.server.calls(pod, replica.tls_url.replace("https", "http")))
