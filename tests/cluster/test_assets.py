"""$KUBEBUILDER_ASSETS, the folder of envtest's users: its programs are started, and none of them is built."""

import os
from pathlib import Path

import pytest

from testcluster import programs, toolchains
from testcluster.controlplane import ControlPlane
from testcluster.proc import ClusterError


@pytest.fixture
def assets(control_plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of links, and a cache in which nothing was built."""
    del control_plane  # its programs are there
    folder = tmp_path / "assets"
    folder.mkdir()
    for name, program in programs.control_plane().items():
        (folder / name).symlink_to(program)
    monkeypatch.setenv(programs.ASSETS, str(folder))
    monkeypatch.setenv("EVERSTEP_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.mark.apiserver
def test_control_plane_of_that_folder_starts_and_builds_nothing(assets: Path, tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path / "plane")
    plane.start()
    try:
        done = plane.kubectl("get", "namespaces", "-o", "name")
        assert "namespace/default" in done.stdout.split(), done.stderr
        assert {Path(daemon.argv[0]).parent for daemon in (plane.etcd, plane.apiserver)} == {assets}
    finally:
        plane.stop()
    assert not (tmp_path / "cache").exists()


@pytest.mark.apiserver
@pytest.mark.parametrize("gone", [["etcd"], ["kube-apiserver"], ["kube-apiserver", "etcd"]])
def test_program_that_is_missing_there_is_named(gone: list[str], assets: Path) -> None:
    for name in gone:
        (assets / name).unlink()
    with pytest.raises(ClusterError) as raised:
        programs.control_plane()
    assert str(raised.value).startswith(
        f"KUBEBUILDER_ASSETS={assets}: it has no executable {' and no '.join(gone)}. Name a folder with "
    )


COMPILER = """#!/bin/sh
[ "$1" = version ] && { echo go version go1.99 linux/amd64; exit; }
while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
echo "$1" > "$out"
"""


@pytest.mark.apiserver
def test_controller_manager_that_is_not_there_is_built_alone(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """envtest's folders have none. The compiler here writes down what it is to compile: a real one takes minutes."""
    (assets / "kube-controller-manager").unlink()
    compiler = tmp_path / "bin" / "go"
    compiler.parent.mkdir()
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:{os.environ['PATH']}")
    toolchains.go.cache_clear()
    try:
        found = programs.control_plane()
    finally:
        toolchains.go.cache_clear()
    built = {name: program for name, program in found.items() if program.parent != assets}
    assert {name: program.read_text() for name, program in built.items()} == {
        "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager\n"
    }
