"""Jobs, clients, networks and operators at a real API server, with the CRD installed once.

No operator runs and no admission policy is installed unless a test does so.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path

import pytest

from everstep_operator.kube.credentials import KubeConfig
from everstep_operator.kube.errors import KubeError
from everstep_operator.kube.transport import ClientLimits, HttpKubeClient
from support import ROOT
from support.apiserver.jobs import Jobs
from support.apiserver.network import Network
from support.apiserver.operators import NewPlace, Place
from support.apiserver.waiting import make_namespace
from support.conformity.bodies import NAMESPACES
from testcluster import programs
from testcluster.controlplane import ControlPlane
from testcluster.kueue import Kueue


@pytest.fixture(scope="module")
def jobs(crd: ControlPlane, request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """A namespace for the jobs of one test module."""
    namespace = request.module.__name__.rpartition(".")[2].replace("_", "-")
    done = crd.kubectl("create", "namespace", namespace)
    assert done.returncode == 0, done.stderr
    yield Jobs(crd, namespace)
    crd.kubectl("delete", "namespace", namespace, "--wait=false")


Helm = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def helm() -> Helm:
    """`helm <verb> <release> <the chart> ...`; fails the test unless told `expect_failure=True`."""

    def call(verb: str, release: str, *flags: str, expect_failure: bool = False) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(programs.helm()), verb, release, str(ROOT / "charts/everstep"), *flags],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode != 0) == expect_failure, done.stderr
        return done

    return call


@pytest.fixture(scope="session")
def kueue(crd: ControlPlane, kueue_programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kueue]:
    """Kueue's controller at the API server, in all namespaces."""
    server = Kueue(crd, tmp_path_factory.mktemp("kueue"), ("TrainingJob.v1alpha1.everstep.dev",))
    server.start()
    yield server
    server.stop()


SERVED = 30.0  # seconds until a new kind is served
MONITORING = ("podmonitors", "servicemonitors", "prometheusrules")


@pytest.fixture(scope="session")
def monitoring_kinds(crd: ControlPlane) -> Iterator[ControlPlane]:
    """The API server, with the kinds of the Prometheus operator."""
    folder = str(programs.monitoring_kinds())
    done = crd.kubectl("apply", "--server-side", "-f", folder)
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + SERVED
    while any(crd.kubectl("get", f"{kind}.monitoring.coreos.com").returncode for kind in MONITORING):
        assert time.monotonic() < deadline, f"they are not served within {SERVED:.0f} s"
        time.sleep(0.1)
    yield crd
    crd.kubectl("delete", "--wait=false", "-f", folder)


@pytest.fixture
async def client(crd: ControlPlane) -> AsyncGenerator[HttpKubeClient, None]:
    async with HttpKubeClient(KubeConfig(str(crd.kubeconfig))) as made:
        yield made


@pytest.fixture
async def network(control_plane: ControlPlane, tmp_path: Path) -> AsyncGenerator[Network, None]:
    made = Network(control_plane.kubeconfig, tmp_path)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def far_client(network: Network) -> AsyncGenerator[HttpKubeClient, None]:
    """A client whose every byte goes through `network`."""
    async with HttpKubeClient(KubeConfig(str(network.kubeconfig)), limits=ClientLimits(request_seconds=3.0)) as made:
        yield made


@pytest.fixture
async def new_place(client: HttpKubeClient) -> AsyncGenerator[NewPlace, None]:
    """Makes namespaces in which pods can be created; they go when the test ends."""
    made: list[str] = []

    async def make() -> Place:
        name = f"test-{uuid.uuid4().hex[:16]}"
        made.append(name)
        await make_namespace(client, name)
        return Place(client, name)

    yield make
    for name in made:
        with contextlib.suppress(KubeError):
            await client.delete(NAMESPACES, None, name)


@pytest.fixture
async def place(new_place: NewPlace) -> Place:
    return await new_place()


@pytest.fixture
async def namespace(place: Place) -> str:
    """A fresh namespace in which pods can be made."""
    return place.namespace
