"""The fixtures that stand for real things: a control plane, an S3 server, a cluster with nodes.

What they need is made before the first test, because it can take longer than any test may.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "cluster"))
sys.path.insert(0, str(Path(__file__).parent / "warm"))

from testcluster import handle, programs, project, stores
from testcluster.controlplane import ControlPlane
from testcluster.s3 import S3Server

STORE_PROGRAMS = {
    "careless_s3_server": stores.s3rver,
    "gcs_server": programs.fake_gcs_server,
    "azure_server": stores.azurite,
}


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what the chosen tests need: minutes on a new machine, nothing on a warm one."""
    if session.config.option.collectonly:
        return
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if "kind_cluster" in wanted:
        handle.obtain()
    if "project_images" in wanted and not handle.obtain().external:
        handle.obtain().load_project()
    if wanted & {"control_plane", "s3_server"}:
        programs.link_all()
    for fixture, make in STORE_PROGRAMS.items():
        if fixture in wanted:
            make()


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """etcd, kube-apiserver and kube-controller-manager on the loopback; no nodes. Tests use namespaces of their own."""
    plane = ControlPlane(tmp_path_factory.mktemp("control-plane"))
    plane.start()
    yield plane
    plane.stop()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """versitygw on the loopback; tests use buckets of their own."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def careless_s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.CarelessS3]:
    """An S3 look-alike that ignores preconditions."""
    server = stores.CarelessS3(tmp_path_factory.mktemp("careless-s3"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def gcs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.GcsServer]:
    """Google Cloud Storage's emulator."""
    server = stores.GcsServer(tmp_path_factory.mktemp("gcs"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.AzureServer]:
    """Azure Blob Storage's emulator."""
    server = stores.AzureServer(tmp_path_factory.mktemp("azure"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def kind_cluster() -> handle.Cluster:
    """A cluster with nodes; tests use namespaces of their own, and bring back the nodes that they kill."""
    return handle.obtain()


@pytest.fixture(scope="session")
def project_images(kind_cluster: handle.Cluster) -> tuple[str, str]:
    """Tags of the operator's and the digits example's images, made of the present sources, on every node."""
    if not kind_cluster.external:  # an external cluster pulls them under the same names
        kind_cluster.load_project()
    return project.OPERATOR, project.DIGITS
