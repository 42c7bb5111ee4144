"""The node image: kind's own where it can be pulled, else one of Debian packages and self-built programs.

The self-built one carries every image that the cluster and the project's tests start, already unpacked, so that a new
cluster starts pods at once.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from testcluster import cache, docker, images, programs, pybases, rootfs, versions
from testcluster.proc import ClusterError, run

SOURCE = cache.HERE / "node"
PRELOAD_LIMIT = 900.0  # seconds


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


def _preload(bare: str, tags: list[str], made: str) -> None:
    container = f"everstep-test-preload-{os.getpid()}"
    with tempfile.TemporaryDirectory(dir=cache.root()) as seed, (cache.logs() / "preload.log").open("wb") as log:
        saver = subprocess.Popen(["docker", "save", *tags], stdout=subprocess.PIPE, stderr=log)
        try:
            loader = subprocess.run(
                ["docker", "run", "-i", "--name", container, "--privileged", "--cgroupns=private",
                 "--entrypoint", "bash", "-v", f"{seed}:/seed", "-v", f"{SOURCE / 'preload.sh'}:/preload.sh:ro",
                 bare, "/preload.sh"],
                stdin=saver.stdout, stdout=log, stderr=log, timeout=PRELOAD_LIMIT, check=False,
            )  # fmt: skip
            if loader.returncode != 0 or saver.wait(timeout=30) != 0:
                raise ClusterError(f"images could not be put into the node image, see {log.name}")
            # A container started with another entry point would keep it in the image.
            entry = 'ENTRYPOINT ["/usr/local/bin/entrypoint", "/lib/systemd/systemd"]'
            run("docker", "commit", "--change", entry, "--change", "CMD []", container, made)
        finally:
            saver.kill()
            saver.wait()
            run("docker", "rm", "-f", container)


def build() -> str:
    """The tag of the node image for `kind create cluster --image`."""
    if docker.exists(versions.KIND_NODE_IMAGE):
        cache.say(0, "node image", f"skipped, have {versions.KIND_NODE_IMAGE}")
        return versions.KIND_NODE_IMAGE
    if docker.registry_answers():
        run("docker", "pull", "-q", versions.KIND_NODE_IMAGE, timeout=pybases.PULL_LIMIT)
        return versions.KIND_NODE_IMAGE
    bare = _bare()
    tags = [*images.system(), pybases.python(), pybases.operator(), pybases.worker()]
    identities = run("docker", "image", "inspect", "--format", "{{.Id}}", *tags).split()
    parts: tuple[cache.Part, ...] = (bare, *tags, *identities, SOURCE / "preload.sh")
    return docker.image("node", parts, lambda made: _preload(bare, tags, made))
