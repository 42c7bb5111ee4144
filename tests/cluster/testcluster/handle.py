"""A cluster with nodes as tests see it: this machine's kind cluster, or any other through `KUBECONFIG`."""

import functools
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testcluster import controlplane, kindcluster, load, programs, project
from testcluster.proc import ClusterError, CommandError, run
from testcluster.s3 import Account

FREEZES = 5  # attempts to pause a node

S3_IN_CLUSTER = "http://s3.s3.svc:7070"


@dataclass(frozen=True, slots=True)
class Cluster:
    """`external` clusters are someone else's: their nodes are not killed, and images reach them by a registry."""

    kubeconfig: Path
    external: bool

    def kubectl(self, *arguments: str, input: str | None = None) -> subprocess.CompletedProcess[str]:
        return controlplane.kubectl(self.kubeconfig, *arguments, input=input)

    def helm(self, *arguments: str, timeout: float = 120) -> str:
        """Output of helm against this cluster. Raises `CommandError`; `timeout` is in seconds."""
        return run(str(programs.helm()), "--kubeconfig", str(self.kubeconfig), *arguments, timeout=timeout)

    def nodes(self) -> list[str]:
        """All nodes' names, sorted; the control plane's is among them."""
        done = self.kubectl("get", "nodes", "-o", "json")
        if done.returncode != 0:
            raise ClusterError(f"the nodes could not be listed: {done.stderr}")
        return sorted(str(node["metadata"]["name"]) for node in json.loads(done.stdout)["items"])

    def workers(self) -> list[str]:
        """The nodes that take pods, sorted."""
        done = self.kubectl("get", "nodes", "-l", "!node-role.kubernetes.io/control-plane", "-o", "name")
        return sorted(name.removeprefix("node/") for name in done.stdout.split())

    def _own(self, what: str) -> None:
        if self.external:
            raise ClusterError(f"{what} is done only to the kind cluster that the tests made, not to an external one")

    def kill_node(self, name: str) -> None:
        """The node's container dies as by a power cut."""
        self._own("killing a node")
        run("docker", "kill", name)

    def pause_node(self, name: str) -> None:
        """The node's processes freeze and its connections stay open."""
        self._own("pausing a node")
        for left in reversed(range(FREEZES)):
            try:
                run("docker", "pause", name)
                return
            except CommandError:  # on a busy machine runc gives up before all processes stand still
                if not left:
                    raise

    def start_node(self, name: str) -> None:
        """Bring back what `kill_node` or `pause_node` took. Ready may precede kube-proxy and DNS there."""
        self._own("starting a node")
        paused = run("docker", "inspect", "-f", "{{.State.Paused}}", name).strip() == "true"
        run("docker", "unpause" if paused else "start", name)

    def wait_ready(self) -> None:
        """Wait until all nodes and system pods are Ready."""
        self._own("waiting for system pods")
        kindcluster.wait_ready()

    def load(self, image: str) -> None:
        """Make an image of this machine's docker startable on every node."""
        self._own("loading images")
        load.load(image, nodes=list(kindcluster.containers()))

    def load_project(self) -> list[str]:
        """Build the project's images of the present sources and load them; returns their tags (`project.py`)."""
        self._own("loading images")
        tags = project.build()
        for tag in tags:
            self.load(tag)
        return tags

    def calls_of(self, account: str) -> list[dict[str, Any]]:
        """What `account` (`system:serviceaccount:NAMESPACE:NAME`) called of the API server, by the audit log."""
        self._own("reading the audit log")
        log = f"cat {kindcluster.AUDIT_LOG.removesuffix('.log')}*"
        lines = run("docker", "exec", self._control_plane(), "sh", "-c", log).splitlines()
        events: list[dict[str, Any]] = [json.loads(line) for line in lines if account in line]
        return [event for event in events if event["user"]["username"] == account]

    def _control_plane(self) -> str:
        return next(name for name in self.nodes() if name.endswith("-control-plane"))

    @property
    def s3(self) -> Account:
        """The S3 server inside the cluster, as this machine reaches it; pods use `s3_in_cluster`."""
        self._own("reaching the S3 server by node port")
        return Account(f"http://{kindcluster.node_address(self._control_plane())}:{kindcluster.S3_NODE_PORT}")

    @property
    def machine(self) -> str:
        """This machine's address, as pods reach it."""
        self._own("reaching this machine from a pod")
        return kindcluster.machine_address(self._control_plane())

    @property
    def s3_in_cluster(self) -> Account:
        return Account(S3_IN_CLUSTER)


@functools.cache
def obtain() -> Cluster:
    """The cluster to test on: `$KUBECONFIG`'s where `EVERSTEP_TEST_CLUSTER=external`, else kind, brought up."""
    if os.environ.get("EVERSTEP_TEST_CLUSTER") == "external":
        path = os.environ.get("KUBECONFIG")
        if not path:
            raise ClusterError("EVERSTEP_TEST_CLUSTER=external needs KUBECONFIG to name the cluster's file")
        return Cluster(Path(path), external=True)
    kindcluster.up(once=os.environ.get("PYTEST_XDIST_TESTRUNUID", ""))
    return Cluster(kindcluster.kubeconfig(), external=False)
