"""The fixtures that stand for real things: a control plane, an S3 server, a cluster with nodes.

What they need is made before the first test, because it can take longer than any test may. So are the system programs
that the chosen tests start, by the list in `testcluster/packages.py`; a test that starts another one fails.
"""

import gc
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from support import ROOT, TESTS
from support.checkpoint.events import Events
from support.lanes import durations, left_out
from support.lanes.hung import Hung
from support.lanes.long import Long
from support.processes.forked import Forked
from support.rendezvous.etcd_server import EtcdCluster
from testcluster import builds, handle, images, packages, programs, project, stores
from testcluster.controlplane import ControlPlane
from testcluster.proc import ClusterError
from testcluster.s3 import S3Server

SERVED = 30.0  # seconds until the API server serves a new kind
FIXTURE_PROGRAMS = {
    "browser_program": lambda: packages.ensure(packages.BROWSER, "the tests marked browser"),
    "kube_router_image": images.kube_router,
    "slurm_programs": lambda: packages.ensure(packages.SLURM, "the tests marked slurm"),
}


class Declared:
    """Which system programs the present test may start. The hook sees what this process starts, not its children."""

    def __init__(self) -> None:
        self.test = ""
        self.allowed: set[str] = set()
        sys.addaudithook(self._on_event)

    def enter(self, item: pytest.Item) -> None:
        self.test, self.allowed = item.nodeid, programs_of(item)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and self.test:
            executable = str(arguments[0])
            if not packages.declared(executable, self.allowed):
                raise RuntimeError(
                    f"{self.test} starts {executable}, which tests/cluster/testcluster/packages.py does not declare "
                    "for its folder: it would fail on a machine without that program"
                )


DECLARED = pytest.StashKey[Declared]()


def programs_of(item: pytest.Item) -> set[str]:
    folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
    return packages.of(folder, (mark.name for mark in item.iter_markers()))


# A busy machine is no finding of a property test. All else stays as in the present profile, in CI that of Hypothesis.
hypothesis.settings.register_profile("without deadline", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("without deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--prepare", action="store_true", help="install and build what the chosen tests need, and run none of them"
    )
    parser.addoption(durations.OPTION, action="store_true", help="the files of tests that took longest begin first")
    parser.addoption(left_out.OPTION, type=Path, metavar="FILE", help="leave out the tests that this file lists")


def pytest_sessionfinish() -> None:
    """A refusal that a test expects stands until this process ends, whose exit code would be 1."""
    refused_end = sys.modules.get("everstep.train.refused_end")
    if refused_end is not None:
        refused_end._Process.refused = None


def pytest_configure(config: pytest.Config) -> None:
    config.stash[DECLARED] = Declared()
    config.pluginmanager.register(Long())
    if config.getoption(durations.OPTION):
        config.pluginmanager.register(durations.LongestFirst(durations.read()))
    listed = config.getoption(left_out.OPTION)
    if listed is not None:
        config.pluginmanager.register(left_out.LeftOut(listed))
    config.pluginmanager.register(Hung(slack=60, limit=float(config.getini("timeout"))))
    if config.option.collectonly or hasattr(config, "workerinput"):  # xdist's workers have what their controller has
        return
    for folder in folders_of(config.args):
        try:
            packages.ensure(packages.of(folder), f"tests/{folder}")
        except ClusterError as e:
            raise pytest.UsageError(str(e)) from e


def folders_of(arguments: list[str]) -> list[str]:
    """Names of the folders below tests/ that pytest's arguments are or are in; all that declare programs, if none."""
    paths = [Path(argument.partition("::")[0]).resolve() for argument in arguments]
    parts = {path.relative_to(TESTS).parts[:1] for path in paths if path.is_relative_to(TESTS)}
    return sorted(packages.FOLDERS) if () in parts or not parts else sorted(part for (part,) in parts)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.config.stash[DECLARED].enter(item)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what the chosen tests need: minutes on a new machine, nothing on a warm one."""
    if session.config.option.collectonly:
        return
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if "kind_cluster" in wanted:
        handle.obtain()
    if "project_images" in wanted and not handle.obtain().external:
        handle.obtain().load_project()
    for name in builds.in_order(name for fixture in wanted for name in builds.OF_FIXTURE.get(fixture, ())):
        builds.BUILDS[name]()
    for fixture, make in FIXTURE_PROGRAMS.items():
        if fixture in wanted:
            make()
    if session.config.option.prepare:
        pytest.exit("prepared, as --prepare asks", returncode=0)


@pytest.fixture(autouse=True)
def _no_children_left() -> Iterator[None]:
    """A DataLoader's worker that outlives its test is the product's mistake, or the test's."""
    before = multiprocessing.active_children()
    yield
    made = [child for child in multiprocessing.active_children() if child not in before]
    if made:
        gc.collect()  # torch ends workers with their iterator, which an error may hold in a cycle
    for child in made:
        child.join(10)
    left = [child for child in made if child.is_alive()]  # to kill one would raise torch's error for it, anywhere
    assert not left


@pytest.fixture(scope="session")
def etcd_program() -> Path:
    """Path of etcd. Whoever starts one asks for it, so that it is built before the first test."""
    return programs.server("etcd")


@pytest.fixture(scope="session")
def oldest_api_server() -> None:
    """A test that starts this program asks for it here. It is built before the first test, which takes minutes."""


@pytest.fixture(scope="session")
def newest_api_server() -> None:
    """The same of the newest."""


@pytest.fixture(scope="session")
def newest_scheduler() -> None:
    """The scheduler of the newest."""


@pytest.fixture(scope="session")
def prometheus_programs() -> Path:
    """Folder of `prometheus` and `promtool`. Whoever starts one asks for it: it is built before the first test."""
    return programs.prometheus()


@pytest.fixture(scope="session")
def kueue_programs() -> None:
    """Kueue's controller and its kinds: the same."""


@pytest.fixture(scope="session")
def browser_program() -> None:
    """Whoever opens a browser asks for it, so that it is installed before the first test."""


@pytest.fixture(scope="session")
def slurm_programs() -> None:
    """Whoever starts Slurm's daemons asks for it, so that they are installed before the first test."""


@pytest.fixture(scope="session")
def etcd(etcd_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One member, on the loopback. Tests use job names of their own."""
    del etcd_program  # built before the first test
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"), 1)
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def etcd_endpoint(etcd: EtcdCluster) -> str:
    """Host and port."""
    return etcd.urls[0].removeprefix("http://")


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """etcd, kube-apiserver and kube-controller-manager on the loopback; no nodes. Tests use namespaces of their own."""
    plane = ControlPlane(tmp_path_factory.mktemp("control-plane"))
    plane.start()
    yield plane
    plane.stop()


@pytest.fixture(scope="session")
def crd(control_plane: ControlPlane) -> ControlPlane:
    """The control plane, serving TrainingJobs."""
    path = str(ROOT / "manifests/crd.yaml")
    done = control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", path)
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + SERVED
    while control_plane.kubectl("get", "tjob").returncode != 0:
        assert time.monotonic() < deadline, f"TrainingJobs are not served within {SERVED:.0f} s"
        time.sleep(0.1)
    return control_plane


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


@pytest.fixture(scope="session")
def kube_router_image(kind_cluster: handle.Cluster) -> str:
    """Its tag, on every node. Its first build takes ten minutes, so that it is built before the first test."""
    tag = images.kube_router()
    kind_cluster.load(tag)
    return tag


@pytest.fixture
def events() -> Events:
    """An `on_event` hook that keeps what it was told."""
    return Events()


@pytest.fixture
def in_child() -> Iterator[Forked]:
    """Runs functions in forked processes; those that still run are killed with the test."""
    forked = Forked()
    yield forked
    forked.kill()


@pytest.fixture(autouse=True)
def _nothing_to_close_at_exit() -> Iterator[None]:
    """Checkpointers that a test forgets are those of processes that died: nothing is to be saved when pytest ends."""
    yield
    if (at_exit := sys.modules.get("everstep.checkpoint.save.at_exit")) is not None:
        at_exit.forget_all()
    if (alive := sys.modules.get("everstep.checkpoint.log.alive")) is not None:
        alive.end_all(5.0)  # or they write files while later tests look for what these have left
