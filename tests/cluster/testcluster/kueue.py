"""Kueue on the loopback: its controller before a control plane without nodes, as it ships, without its webhooks.

Its webhooks give defaults and refuse mistakes of people. Nothing here is sent through them: whoever makes a Workload
gives every field that matters.
"""

import json
import os
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path

from testcluster import programs
from testcluster.controlplane import ControlPlane
from testcluster.daemon import Daemon, free_ports
from testcluster.handle import Cluster
from testcluster.proc import run

GATES = {"VisibilityOnDemand": False, "ElasticJobsViaWorkloadSlices": True}
CONFIG = "config.kueue.x-k8s.io/v1beta2"
SERVED = 30.0  # seconds until new kinds are served


class Kueue:
    """`frameworks`: the kinds whose workloads another controller makes, as `TrainingJob.v1alpha1.everstep.dev`."""

    def __init__(self, plane: ControlPlane | Cluster, folder: Path, frameworks: tuple[str, ...]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._plane, self._folder = plane, folder
        self._health, webhook = free_ports(2)
        certificates = folder / "certificates"
        certificates.mkdir()
        key, chain = certificates / "tls.key", certificates / "tls.crt"
        run(
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=kueue", "-days", "2",
            "-keyout", str(key), "-out", str(chain),
        )  # fmt: skip
        config = {
            "apiVersion": CONFIG,
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": f"127.0.0.1:{self._health}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"port": webhook, "host": "127.0.0.1", "certDir": str(certificates)},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "integrations": {"frameworks": ["batch/job"], "externalFrameworks": list(frameworks)},
        }
        file = folder / "config.yaml"
        file.write_text(json.dumps(config, indent=1))  # JSON is YAML
        gates = ",".join(f"{name}={str(on).lower()}" for name, on in GATES.items())
        # Where certificates are not its own affair, Kueue reads those of its metrics below /etc, and ends without them.
        # So it has an /etc of its own, with these in it.
        below_etc = folder / "etc" / "kueue" / "metrics" / "certs"
        below_etc.mkdir(parents=True)
        for made in (key, chain):
            shutil.copyfile(made, below_etc / made.name)
        (folder / "work").mkdir()
        layers = f"lowerdir=/etc,upperdir={folder / 'etc'},workdir={folder / 'work'}"
        argv = [
            "unshare", "--mount", "sh", "-c", f'mount -t overlay overlay -o {layers} /etc && exec "$@"', "kueue",
            str(programs.kueue()), f"--config={file}", f"--feature-gates={gates}", "--zap-log-level=2",
        ]  # fmt: skip
        environ = {**os.environ, "KUBECONFIG": str(plane.kubeconfig), "POD_NAMESPACE": "kueue-system"}
        self._daemon = Daemon(argv, folder / "kueue.log", self._answers, env=environ)

    def start(self) -> None:
        """Its kinds, then itself. Raises `ClusterError`."""
        done = self._plane.kubectl("apply", "--server-side", "-f", str(programs.kueue_kinds()))
        assert done.returncode == 0, done.stderr
        deadline = time.monotonic() + SERVED
        for kind in ("workloads", "clusterqueues", "localqueues", "resourceflavors"):
            while self._plane.kubectl("get", f"{kind}.kueue.x-k8s.io", "-A").returncode != 0:
                assert time.monotonic() < deadline, f"{kind} are not served within {SERVED:.0f} s"
                time.sleep(0.1)
        self._plane.kubectl("create", "namespace", "kueue-system")
        self._daemon.start()

    def stop(self) -> None:
        self._daemon.kill()  # nothing of it is used again

    def log(self) -> str:
        return (self._folder / "kueue.log").read_text()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._health}/readyz", timeout=2) as reply:
                return bool(reply.status == 200)
        except urllib.error.HTTPError:
            return False
