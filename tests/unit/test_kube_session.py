"""What the environment of a process may change about its requests to the API server, and what it may not."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from everstep_operator.kube.credentials import KubeConfig
from everstep_operator.kube.resources import PODS
from everstep_operator.kube.session import encoded, environment_proxy
from everstep_operator.kube.transport import HttpKubeClient

POD = {"metadata": {"name": "a", "namespace": "ns", "uid": "u", "resourceVersion": "1"}}


class Server:
    """Answers every request with a pod, as an API server does or as a proxy before one."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []  # request target as it was sent, authorization
        self.address = ""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.seen.append((request.raw_path, request.headers.get("Authorization", "")))
        await request.read()
        return web.json_response(POD)


@pytest.fixture
async def server() -> AsyncGenerator[Server, None]:
    made = Server()
    runner = web.ServerRunner(web.Server(made.answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.address = "{}:{}".format(*runner.addresses[0][:2])
    yield made
    await runner.cleanup()


def kubeconfig(folder: Path, address: str, **cluster: Any) -> KubeConfig:
    file = folder / "kubeconfig"
    file.write_text(
        json.dumps(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": f"http://{address}", **cluster}}],
                "users": [{"name": "u", "user": {"token": "ours"}}],
            }
        )
    )
    return KubeConfig(str(file))


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


async def test_netrc_of_the_user_does_not_replace_the_token(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password else\n")
    monkeypatch.setenv("NETRC", str(netrc))
    async with HttpKubeClient(kubeconfig(tmp_path, server.address)) as client:
        assert (await client.get(PODS, "ns", "a")).metadata.name == "a"
    assert server.seen == [("/api/v1/namespaces/ns/pods/a", "Bearer ours")]


async def test_requests_start_no_threads(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the environment in a thread took longer than the request itself."""
    loop = asyncio.get_running_loop()
    started: list[object] = []
    ordinary = loop.run_in_executor
    async with HttpKubeClient(kubeconfig(tmp_path, server.address)) as client:
        await client.get(PODS, "ns", "a")  # loads the credentials, and looks the host up
        monkeypatch.setattr(loop, "run_in_executor", lambda *given: (started.append(given[1:]), ordinary(*given))[1])
        for _ in range(3):
            await client.create(PODS, "ns", POD)
    assert started == []


async def test_proxy_of_the_environment_is_used(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://{server.address}")
    async with HttpKubeClient(kubeconfig(tmp_path, "api.example:6443")) as client:
        await client.get(PODS, "ns", "a")
    assert server.seen == [("http://api.example:6443/api/v1/namespaces/ns/pods/a", "Bearer ours")]


async def test_proxy_of_the_kubeconfig_comes_before_that_of_the_environment(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    source = kubeconfig(tmp_path, "api.example:6443", **{"proxy-url": f"http://{server.address}"})
    async with HttpKubeClient(source) as client:
        await client.get(PODS, "ns", "a")
    assert len(server.seen) == 1


@pytest.mark.parametrize("host", ["10.96.0.1", "api.example", "[fd00::1]"])
def test_server_in_no_proxy_is_asked_directly(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert environment_proxy(f"https://{host}:443") == "http://proxy:3128"
    monkeypatch.setenv("NO_PROXY", f"localhost,{host.strip('[]')}")
    assert environment_proxy(f"https://{host}:443") is None


def test_half_of_a_surrogate_pair_is_sent() -> None:
    """A status may quote a worker's text: a pass that cannot write it would fail for ever."""
    assert json.loads(encoded({"message": "\ud83d ends here"})) == {"message": "\ud83d ends here"}
