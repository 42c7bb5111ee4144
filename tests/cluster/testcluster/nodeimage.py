"""The node image: kind's own where it can be pulled, else one of Debian packages and self-built programs.

The self-built one knows every image that the cluster and the project's tests start. Their layers lie unpacked in the
cache and are mounted into the nodes, so that a new cluster starts pods at once and no node holds a copy.
"""

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from testcluster import cache, docker, images, programs, pybases, rootfs, versions
from testcluster.proc import ClusterError, run

SOURCE = cache.HERE / "node"
PRELOAD_LIMIT = 900.0  # seconds


@dataclass(frozen=True, slots=True)
class NodeImage:
    """`layers` is the folder that the nodes need at /kind/layers; None for kind's own image, which needs none."""

    tag: str
    layers: Path | None


def _bare() -> str:
    root = rootfs.node()
    kube, tools = programs.kubernetes(), programs.node_tools()
    base = docker.image("debian", (root.parent.name,), lambda tag: docker.import_tar(root, tag))

    def make(tag: str) -> None:
        with tempfile.TemporaryDirectory(dir=cache.root()) as folder:
            context = Path(folder)
            shutil.copytree(SOURCE / "files", context / "files")
            shutil.copy2(SOURCE / "Dockerfile", context)
            (context / "files/kind/version").write_text(f"v{versions.KUBERNETES}\n")
            (context / "bin").mkdir()
            for program in (kube / "kubelet", kube / "kubeadm", kube / "kubectl", tools / "crictl"):
                shutil.copy2(program, context / "bin")
            docker.build(context, tag, "--build-arg", f"BASE={base}")

    parts: tuple[cache.Part, ...] = (base, kube.name, tools.name, SOURCE / "files", SOURCE / "Dockerfile")
    return docker.image("node-bare", parts, make)


def _unpack(bare: str, tags: list[str], out: Path) -> None:
    """Let a node's own containerd unpack the images into `out`."""
    with (cache.logs() / "preload.log").open("wb") as log:
        saver = subprocess.Popen(["docker", "save", *tags], stdout=subprocess.PIPE, stderr=log)
        container = f"everstep-test-preload-{os.getpid()}"
        try:
            loader = subprocess.run(
                ["docker", "run", "-i", "--rm", "--name", container, "--privileged", "--cgroupns=private",
                 "--entrypoint", "bash", "-v", f"{out}:/seed", "-v", f"{SOURCE / 'preload.sh'}:/preload.sh:ro",
                 bare, "/preload.sh"],
                stdin=saver.stdout, stdout=log, stderr=log, timeout=PRELOAD_LIMIT, check=False,
            )  # fmt: skip
            if loader.returncode != 0 or saver.wait(timeout=30) != 0:
                raise ClusterError(f"images could not be unpacked for the nodes, see {log.name}")
        finally:
            saver.kill()
            saver.wait()
            if docker.container_exists(container):
                run("docker", "rm", "-f", container)


def build() -> NodeImage:
    """The image for `kind create cluster --image`, and what to mount."""
    if docker.exists(versions.KIND_NODE_IMAGE):
        cache.say_skipped("node image", versions.KIND_NODE_IMAGE)
        return NodeImage(versions.KIND_NODE_IMAGE, None)
    if docker.registry_answers():
        run("docker", "pull", "-q", versions.KIND_NODE_IMAGE, timeout=pybases.PULL_LIMIT)
        return NodeImage(versions.KIND_NODE_IMAGE, None)
    bare = _bare()
    tags = [*images.system(), pybases.python(), pybases.operator(), pybases.worker()]
    identities = run("docker", "image", "inspect", "--format", "{{.Id}}", *tags).split()
    parts: tuple[cache.Part, ...] = (bare, *tags, *identities, SOURCE / "preload.sh")
    unpacked = cache.artifact("preload", parts, lambda out: _unpack(bare, tags, out))

    def make(tag: str) -> None:
        recipe = f"FROM {bare}\nCOPY containerd /var/lib/containerd\n"
        with tempfile.TemporaryDirectory(dir=cache.root()) as folder:
            (Path(folder) / "Dockerfile").write_text(recipe)
            shutil.copytree(unpacked / "containerd", Path(folder) / "containerd", symlinks=True)
            docker.build(Path(folder), tag)

    return NodeImage(docker.image("node", (bare, unpacked.name), make), unpacked / "layers")
