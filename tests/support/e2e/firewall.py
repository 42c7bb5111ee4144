"""A pod network that enforces NetworkPolicies, for as long as a test needs one.

The test cluster's own network does not enforce them, and the tests beside this one have no use for it. So kube-router's
firewall runs on the nodes inside the block alone (`manifests/firewall.yaml`), and takes its rules along.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from support import TESTS
from support.scenarios.player import wait_for
from support.scenarios.reference import ScenarioError
from testcluster.handle import Cluster
from testcluster.proc import run

MANIFEST = str(TESTS / "cluster" / "manifests" / "firewall.yaml")
GONE = 90  # seconds, of which kube-router may take 30
READY = 90
OWN_CHAINS = ("KUBE-ROUTER-", "KUBE-POD-FW-", "KUBE-NWPLCY-")


@contextmanager
def firewall(cluster: Cluster) -> Iterator[None]:
    """Whatever happens, it is gone afterwards. Its image, `kube_router_image`, is on the nodes."""
    try:
        done = cluster.kubectl("apply", "-f", MANIFEST)
        if done.returncode != 0:
            raise ScenarioError(f"the firewall could not be made: {done.stderr}")
        ready = ("rollout", "status", "daemonset/kube-router", f"--timeout={READY}s")
        wait_for("the firewall's pods", lambda: bool(_pods(cluster)), READY)
        if (done := cluster.kubectl("-n", "firewall", *ready)).returncode != 0:
            said = cluster.kubectl("-n", "firewall", "logs", "-l", "app=kube-router", "--tail=20")
            raise ScenarioError(f"the firewall does not start: {done.stdout}{done.stderr}\n{said.stdout}{said.stderr}")
        yield
    finally:
        # Its pods first: the namespace's end would take their configuration along.
        cluster.kubectl("-n", "firewall", "delete", "daemonset", "kube-router", "--ignore-not-found")
        wait_for("the firewall's pods are gone", lambda: not _pods(cluster), GONE)
        cluster.kubectl("delete", "-f", MANIFEST, "--ignore-not-found", "--wait=false")
    for node in cluster.workers():
        rules = run("docker", "exec", node, "iptables-save", "-t", "filter")
        if left := [line for line in rules.splitlines() if any(chain in line for chain in OWN_CHAINS)]:
            raise ScenarioError(f"rules of the firewall are left on {node}: {left[:5]}")


def _pods(cluster: Cluster) -> list[str]:
    return str(cluster.kubectl("-n", "firewall", "get", "pods", "-o", "name").stdout).split()
