"""What `helm test` runs: against a real API server, with a leader and without one."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from aiohttp import web

from everstep_local.apiserver.cluster import MemoryCluster
from everstep_local.apiserver.faults import Faults, Refuse
from everstep_operator.endpoint.server import HttpServer, ServerOptions, add_alive
from everstep_operator.installation_check import check
from everstep_operator.kube.resources import LEASES
from everstep_operator.kube.wire import micro_time
from everstep_operator.main import JOBS, LEASE
from everstep_operator.runtime.clock import SystemClock
from support.apiserver.operators import Place
from support.operator.authorities import Authority, put
from testcluster.daemon import free_ports

pytestmark = pytest.mark.apiserver


@pytest.fixture
async def url() -> AsyncGenerator[str, None]:
    """A server that answers as a replica does."""
    app = web.Application()
    add_alive(app.router)
    runner = web.AppRunner(app)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


@contextlib.asynccontextmanager
async def lease(place: Place, *, renewed: bool) -> AsyncGenerator[None, None]:
    def spec() -> dict[str, object]:
        return {"holderIdentity": "operator-0", "leaseDurationSeconds": 6, "renewTime": micro_time(datetime.now(UTC))}

    async def renew() -> None:
        while renewed:
            await asyncio.sleep(0.5)
            await place.client.merge_patch(LEASES, place.namespace, LEASE, {"spec": spec()})

    await place.client.create(LEASES, place.namespace, {"metadata": {"name": LEASE}, "spec": spec()})
    task = asyncio.create_task(renew())
    yield
    task.cancel()


async def test_leader_and_an_answer_are_all_that_is_wanted(
    place: Place, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with lease(place, renewed=True):
        assert await check(place.client, place.namespace, url)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok", "ok", "ok"]
    assert "operator-0 leads" in lines[1]


@pytest.mark.parametrize("exists", [True, False])
async def test_lease_that_nobody_renews_fails_with_where_to_look(
    place: Place, url: str, capsys: pytest.CaptureFixture[str], exists: bool
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        if exists:
            await stack.enter_async_context(lease(place, renewed=False))
        assert not await check(place.client, place.namespace, url, seconds=0)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert "no replica leads" in line
    assert f"kubectl -n {place.namespace} logs" in line


async def test_address_where_nobody_answers_fails_and_is_named(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = free_ports(1)
    async with lease(place, renewed=True):
        assert not await check(place.client, place.namespace, f"http://127.0.0.1:{port}", seconds=0)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert f"workers do not reach the operator at http://127.0.0.1:{port}" in line


async def test_operator_with_tls_is_verified_as_workers_do(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority()
    chain, key = authority.issue("localhost")
    put(tmp_path, tls_crt=chain, tls_key=key, ca_crt=authority.pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    (port,) = free_ports(1)
    options = ServerOptions("127.0.0.1", port, tls=context)
    async with HttpServer([add_alive], options), lease(place, renewed=True):
        url = f"https://localhost:{port}"
        assert await check(place.client, place.namespace, url, ca_file=tmp_path / "ca.crt")
        assert not await check(place.client, place.namespace, url, seconds=0)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert "CERTIFICATE_VERIFY_FAILED" in line


async def test_an_api_server_without_the_crd_fails_with_what_to_install(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = Faults()
    faults.add(Refuse(404), "list", resource=JOBS)
    client = MemoryCluster(SystemClock()).client(faults=faults)
    assert not await check(client, "default", url, seconds=0)
    assert "crds.install=true" in capsys.readouterr().out
