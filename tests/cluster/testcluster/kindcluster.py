"""The kind cluster (`everstep`, or what `$EVERSTEP_CLUSTER` says): up, down, and the death and return of its nodes.

Invariant: `up` ends with every node and every system pod Ready, or raises. It never replaces a cluster of which a node
runs. What the API server says of nodes and pods just after they came back is what it knew before they died, so "Ready"
counts only with a sign of life that is younger than the node's start.
"""

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from testcluster import cache, docker, images, load, nodeimage, programs, pybases, rootfs, versions
from testcluster.nodeimage import NodeImage
from testcluster.proc import ClusterError, run, succeeds

NAME = os.environ.get("EVERSTEP_CLUSTER") or "everstep"
WORKERS = 2
READY_LIMIT = 180  # seconds for nodes and system pods
S3_NODE_PORT = 30900  # as in manifests/s3.yaml
S3_DATA = "/var/lib/everstep-s3"  # as in manifests/s3.yaml
EXAMPLE_BUCKET = "everstep"
MANIFESTS = cache.HERE / "manifests"

# A silent node is NotReady after 12 s and its pods are deleted 10 s later; Kubernetes' own settings: 50 s, 300 s.
FAST_PATCHES = """\
- |
  kind: ClusterConfiguration
  apiServer:
    extraArgs:
      default-not-ready-toleration-seconds: "10"
      default-unreachable-toleration-seconds: "10"
  controllerManager:
    extraArgs:
      node-monitor-period: 2s
      node-monitor-grace-period: 12s
- |
  kind: KubeletConfiguration
  nodeStatusUpdateFrequency: 3s
  nodeLeaseDurationSeconds: 12
"""
AUDIT_LOG = "/var/log/kubernetes/audit.log"
AUDIT_PATCH = f"""\
- |
  kind: ClusterConfiguration
  apiServer:
    extraArgs:
      audit-policy-file: /etc/kubernetes/audit/audit.yaml
      audit-log-path: {AUDIT_LOG}
      audit-log-maxsize: "64"
      audit-log-maxbackup: "1"
    extraVolumes:
    - name: audit-policy
      hostPath: /kind/audit
      mountPath: /etc/kubernetes/audit
      readOnly: true
    - name: audit-log
      hostPath: {Path(AUDIT_LOG).parent}
      mountPath: {Path(AUDIT_LOG).parent}
      pathType: DirectoryOrCreate
"""
# Where a test says at which address the nodes reach a registry.
REGISTRIES = "/etc/containerd/certs.d"
REGISTRY_PATCH = f"""\
containerdConfigPatches:
- |-
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "{REGISTRIES}"
"""


def kubeconfig() -> Path:
    """Written by `up`, taken away by `down`; the cache folder holds one for each cluster's name."""
    return cache.root() / ("kubeconfig" if NAME == "everstep" else f"kubeconfig-{NAME}")


def _config(image: NodeImage, fast: bool, workers: int) -> str:
    layers = [f"{{hostPath: {image.layers}, containerPath: /kind/layers, readOnly: true}}"] if image.layers else []
    audit = f"{{hostPath: {_audit_folder()}, containerPath: /kind/audit, readOnly: true}}"
    roles = {"control-plane": [*layers, audit], **{f"worker {number}": layers for number in range(workers)}}
    nodes = "".join(f"- role: {r.split()[0]}\n  extraMounts: [{', '.join(m)}]\n" for r, m in roles.items())
    head = "kind: Cluster\napiVersion: kind.x-k8s.io/v1alpha4\n"
    head += "networking: {podSubnet: 10.244.0.0/16, serviceSubnet: 10.96.0.0/16}\n"
    head += "kubeadmConfigPatches:\n" + AUDIT_PATCH + (FAST_PATCHES if fast else "")
    if image.layers:  # kind's own image has it
        head += REGISTRY_PATCH
    return head + "nodes:\n" + nodes


def _audit_folder() -> Path:
    """Where the policy of the audit log is, for as long as a cluster runs."""
    folder = cache.root() / "audit"
    folder.mkdir(exist_ok=True)
    shutil.copy(MANIFESTS / "audit.yaml", folder)
    return folder


def compile_all() -> None:
    """The programs that nodes and their images are made of."""
    for make in (programs.node_tools, programs.pause, programs.etcd, programs.coredns, programs.link_all):
        make()


def bootstrap_all() -> None:
    """The file systems that images are made of, where none can be pulled. Needs no docker that runs."""
    if not docker.exists(versions.KIND_NODE_IMAGE) and not docker.registry_answers():
        rootfs.node()
        rootfs.iptables()
        rootfs.python()


def build() -> NodeImage:
    """Make everything that can be made before a cluster exists; returns the node image.

    Compiling and installing packages overlap: one waits for the processor, the other for the network and the disk.
    """

    def install_all() -> None:
        docker.ensure()
        bootstrap_all()
        pybases.operator()
        pybases.worker()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(install_all), pool.submit(compile_all)]:
            done.result()
    return nodeimage.build()


def kubectl(*arguments: str, stdin: bytes | None = None, timeout: float = 200) -> str:
    """Output of kubectl against this cluster. Raises `CommandError`."""
    program = programs.kubernetes() / "kubectl"
    return run(str(program), "--kubeconfig", str(kubeconfig()), *arguments, stdin=stdin, timeout=timeout)


def containers() -> dict[str, str]:
    """Node container → its docker state (`running`, `exited`, `paused`), sorted by name."""
    listing = run(
        "docker", "ps", "-a", "--filter", f"label=io.x-k8s.kind.cluster={NAME}", "--format", "{{.Names}} {{.State}}"
    )  # fmt: skip
    return dict(sorted(line.split() for line in listing.splitlines()))


def _create(image: NodeImage, fast: bool, workers: int) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config:
        config.write(_config(image, fast, workers))
        config.flush()
        run(
            str(programs.kind()), "create", "cluster", "--name", NAME, "--image", image.tag, "--config", config.name,
            "--kubeconfig", str(kubeconfig()), log=cache.logs() / "kind-create.log", timeout=600,
        )  # fmt: skip


def _revive() -> None:
    """Bring nodes back that a test has killed or paused."""
    for name, state in containers().items():
        if state == "paused":
            run("docker", "unpause", name)
        elif state != "running":
            run("docker", "start", name)


def _instant(rfc3339: str) -> datetime:
    """To the microsecond; docker writes nanoseconds, which Python 3.11 does not read."""
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", rfc3339))


def started() -> dict[str, datetime]:
    """Node → when its container last started."""
    names = list(containers())
    lines = run("docker", "inspect", "-f", "{{.State.StartedAt}}", *names).splitlines()
    return dict(zip(names, map(_instant, lines), strict=True))


def stale(leases: dict[str, Any], pods: dict[str, Any], nodes: dict[str, datetime], since: datetime) -> list[str]:
    """What the API server remembers from before: leases not renewed since `since`, containers older than their node.

    `leases` and `pods` are Kubernetes lists. A node without a lease, and a pod without containers, are stale too.
    """
    fresh = {
        lease["metadata"]["name"] for lease in leases["items"] if _instant(lease["spec"]["renewTime"]) > since
    }  # fmt: skip
    found = [f"lease {name}" for name in [*nodes, "kube-controller-manager", "kube-scheduler"] if name not in fresh]
    for pod in pods["items"]:
        running = [one.get("state", {}).get("running") for one in pod["status"].get("containerStatuses", [])]
        # Seconds are all that Kubernetes tells of a container's start.
        node = nodes.get(pod["spec"].get("nodeName", ""))
        if not (
            node
            and running
            and all(one and _instant(one["startedAt"]) >= node.replace(microsecond=0) for one in running)
        ):
            found.append(f"pod {pod['metadata']['name']}")
    return found


def _read(*arguments: str) -> dict[str, Any]:
    return dict(json.loads(kubectl("get", "-o", "json", *arguments)))


def wait_ready() -> None:
    """Wait for signs of life of nodes and controllers, then for Ready nodes and system pods, then for the S3 server."""
    since, deadline = datetime.now(UTC), time.monotonic() + READY_LIMIT
    while True:
        leases = _read("lease", "-A")
        pods = _read("pod", "-n", "kube-system")
        pods["items"] += _read("pod", "-n", "s3")["items"]
        old = stale(leases, pods, started(), since)
        if not old:
            break
        if time.monotonic() > deadline:
            raise ClusterError(f"cluster {NAME}: no sign of life from {', '.join(old)}: `cluster.py down`, then `up`.")
        time.sleep(0.5)
    limit = f"--timeout={READY_LIMIT}s"
    kubectl("wait", "--for=condition=Ready", "node", "--all", limit)
    for namespace in ("kube-system", "s3"):
        kubectl("-n", namespace, "wait", "--for=condition=Ready", "pod", "--all", limit)
    control_plane = next(name for name in containers() if name.endswith("-control-plane"))
    server = f"http://{node_address(control_plane)}:{S3_NODE_PORT}/healthz"
    while not _healthy(server):
        if time.monotonic() > deadline:
            raise ClusterError(f"cluster {NAME}: the S3 server does not answer at {server}")
        time.sleep(0.5)


def _healthy(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as reply:
        return bool(reply.status == 200)
    return False


def _answers() -> bool:
    return kubeconfig().exists() and succeeds(
        str(programs.kubernetes() / "kubectl"), "--kubeconfig", str(kubeconfig()), "get", "--raw", "/readyz", timeout=20
    )


def _apply_s3() -> None:
    load.load(images.s3(), nodes=list(containers()))
    kubectl("apply", "-f", str(MANIFESTS / "s3.yaml"))
    kubectl("-n", "s3", "rollout", "status", "deployment/s3", f"--timeout={READY_LIMIT}s")
    # A bucket is a folder there; the example's job and the credentials beside it expect this one.
    control_plane = next(name for name in containers() if name.endswith("-control-plane"))
    run("docker", "exec", control_plane, "mkdir", "-p", f"{S3_DATA}/{EXAMPLE_BUCKET}")


def up(fast: bool = True, workers: int = WORKERS, once: str = "") -> None:
    """A cluster with every node Ready: nothing to do, dead nodes started, or a new one, also where all were dead.

    A node image is made for a new cluster alone. `once`: the name of a run of tests, for which one of its processes
    does it.
    """
    docker.ensure()
    done = cache.root() / f"up-{NAME}"
    with cache.lock(f"cluster-{NAME}"):
        began = time.monotonic()
        states = containers()
        if once and states and done.exists() and done.read_text() == once:
            return
        if states and not {"running", "paused"} & set(states.values()):
            # All of it died with its docker. What a whole control plane remembers then is not worth the wait for it.
            _delete()
            states = {}
        if states:
            _revive()
            deadline = time.monotonic() + READY_LIMIT
            while not _answers():
                if time.monotonic() > deadline:
                    raise ClusterError(f"cluster {NAME} exists but does not answer: `cluster.py down`, then `up`.")
                time.sleep(0.5)
            how = "skipped, it runs (`cluster.py down` and `up` make one of the present node image)"
        else:
            _create(build(), fast, workers)
            how = "created"
        _apply_s3()
        wait_ready()
        done.write_text(once)
        cache.say(time.monotonic() - began, f"cluster {NAME}", f"{how}, all Ready, KUBECONFIG={kubeconfig()}")


def _delete() -> None:
    run(str(programs.kind()), "delete", "cluster", "--name", NAME, "--kubeconfig", str(kubeconfig()))
    kubeconfig().unlink(missing_ok=True)


def down() -> None:
    began = time.monotonic()
    with cache.lock(f"cluster-{NAME}"):
        docker.ensure()
        _delete()
    cache.say(time.monotonic() - began, f"cluster {NAME}", "deleted")


def status() -> str:
    """What a person wants to see first."""
    if not containers():
        return f"cluster {NAME} does not exist: `cluster.py up` makes it"
    lines = [f"{name}: {state}" for name, state in containers().items()]
    if not _answers():
        return "\n".join([*lines, "its API server does not answer"])
    return "\n".join([*lines, kubectl("get", "nodes,pods", "-A", "-o", "wide")])


def node_address(name: str) -> str:
    """The node's IPv4 address in docker's network `kind`, reachable from this machine."""
    return str(_network(name)["IPAddress"])


def machine_address(node: str) -> str:
    """This machine's IPv4 address in docker's network `kind`, reachable from `node` and its pods."""
    return str(_network(node)["Gateway"])


def _network(node: str) -> dict[str, object]:
    networks = json.loads(run("docker", "inspect", "-f", "{{json .NetworkSettings.Networks}}", node))
    found: dict[str, object] = networks["kind"]
    return found
