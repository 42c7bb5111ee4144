"""A kube-scheduler on the loopback, with its default plugins and weights."""

import json
import ssl
import urllib.request
from pathlib import Path

from testcluster.controlplane import PROBE_LIMIT, ControlPlane
from testcluster.daemon import Daemon, free_ports


def scheduler(plane: ControlPlane, folder: Path, program: Path, name: str, gates: str = "") -> Daemon:
    """Serves the pods that give `name` as that of their scheduler. Whoever asks for it starts and ends it. `gates`:
    feature gates, as its flag takes them."""
    config = folder / "config"
    config.write_text(json.dumps({
        "apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(plane.kubeconfig)}, "leaderElection": {"leaderElect": False},
        "profiles": [{"schedulerName": name}],
    }))  # fmt: skip
    (port,) = free_ports(1)
    context = ssl._create_unverified_context()

    def answers() -> bool:
        address = f"https://127.0.0.1:{port}/healthz"
        with urllib.request.urlopen(address, timeout=PROBE_LIMIT, context=context) as reply:
            return bool(reply.status == 200)

    argv = [
        str(program), f"--config={config}", "--bind-address=127.0.0.1", f"--secure-port={port}", f"--cert-dir={folder}",
        f"--authentication-kubeconfig={plane.kubeconfig}", f"--authorization-kubeconfig={plane.kubeconfig}",
        *([f"--feature-gates={gates}"] if gates else []),
    ]  # fmt: skip
    return Daemon(argv, folder / "log", answers)
