"""A port of the cluster on this machine, by `kubectl port-forward`."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from support.scenarios.reference import ScenarioError
from testcluster import programs
from testcluster.handle import Cluster


@contextmanager
def forwarded(cluster: Cluster, namespace: str, target: str, port: int) -> Iterator[str]:
    """The URL of this port of `target`, such as `service/NAME`. One of its pods answers, until the block ends."""
    kubectl = [str(programs.server("kubectl")), "--kubeconfig", str(cluster.kubeconfig), "--namespace", namespace]
    with subprocess.Popen([*kubectl, "port-forward", target, f":{port}"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"127\.0\.0\.1:(\d+)", line)
            if not found:
                raise ScenarioError(f"kubectl port-forward {target}: {line!r}")
            yield f"http://127.0.0.1:{found[1]}"
        finally:
            process.terminate()
