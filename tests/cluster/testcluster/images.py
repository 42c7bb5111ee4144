"""The images that kubeadm wants, and the S3 server's, from static programs."""

import io
import shutil
import tarfile
import tempfile
from pathlib import Path

from testcluster import cache, docker, programs, rootfs, versions
from testcluster.proc import run

KUBERNETES_TAG = f"v{versions.KUBERNETES}"
PATH_ENV = "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PODNET = "everstep-test/podnet:v1"
KUBE_ROUTER = "everstep-test/kube-router:v1"
S3 = "everstep-test/versitygw:v1"  # fixed names: manifests refer to them


def _layer(program: Path, at: str) -> bytes:
    """A root file system with one program and /tmp; the same bytes for the same program."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        temporary = tarfile.TarInfo("tmp")
        temporary.type, temporary.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(temporary)
        entry = tarfile.TarInfo(at)
        entry.mode, entry.size = 0o755, program.stat().st_size
        with program.open("rb") as data:
            tar.addfile(entry, data)
    return buffer.getvalue()


def _alone(tag: str, program: Path, at: str) -> str:
    """An image of nothing but `program`."""

    def make(made: str) -> None:
        changes = ["--change", f"ENV {PATH_ENV}", "--change", f'ENTRYPOINT ["/{at}"]']
        run("docker", "import", *changes, "-", made, stdin=_layer(program, at))

    name = tag.rpartition(":")[0].rpartition("/")[2]
    made = docker.image(f"system/{name}", (program.parent.name, at), make)
    run("docker", "tag", made, tag)
    return tag


def _with_iptables(tag: str, program: Path, root: Path | None = None) -> str:
    """An image of `program` and the iptables that it calls; `root` has more than iptables."""
    root = root or rootfs.iptables()
    name = root.parent.parent.name.removeprefix("rootfs-")
    base = docker.image(name, (root.parent.name,), lambda made: docker.import_tar(root, made, f"ENV {PATH_ENV}"))

    def make(made: str) -> None:
        with tempfile.TemporaryDirectory(dir=cache.root()) as folder:
            shutil.copy2(program, folder)
            lines = [
                f"FROM {base}",
                f"COPY {program.name} /usr/local/bin/",
                f'ENTRYPOINT ["/usr/local/bin/{program.name}"]',
            ]
            (Path(folder) / "Dockerfile").write_text("\n".join(lines) + "\n")
            docker.build(Path(folder), made)

    made = docker.image(f"system/{program.name}", (program.parent.name, base), make)
    run("docker", "tag", made, tag)
    return tag


def system() -> list[str]:
    """The tags of everything that a node needs before any user's pod: control plane, proxy, DNS, network, pause, S3."""
    kube = programs.kubernetes()
    registry = "registry.k8s.io"
    alone = [
        _alone(f"{registry}/{name}:{KUBERNETES_TAG}", kube / name, f"usr/local/bin/{name}")
        for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
    ]
    return [
        *alone,
        _alone(f"{registry}/etcd:{versions.ETCD}-0", programs.etcd(), "usr/local/bin/etcd"),
        _alone(f"{registry}/coredns/coredns:v{versions.COREDNS}", programs.coredns(), "coredns"),
        _alone(f"{registry}/pause:{versions.PAUSE}", programs.pause(), "pause"),
        _with_iptables(f"{registry}/kube-proxy:{KUBERNETES_TAG}", kube / "kube-proxy"),
        _with_iptables(PODNET, programs.node_tools() / "podnet"),
        s3(),
    ]


def s3() -> str:
    return _alone(S3, programs.versitygw(), "usr/local/bin/versitygw")


def kube_router() -> str:
    """For `manifests/firewall.yaml`; no node has it from the start."""
    return _with_iptables(KUBE_ROUTER, programs.kube_router(), rootfs.ipset())
