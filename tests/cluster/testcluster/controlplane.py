"""A Kubernetes control plane without nodes: real etcd, kube-apiserver and kube-controller-manager on the loopback.

For tests that need the API's behaviour (validation, conflicts, watches, garbage collection, tokens) and no running pod.
What no node does, a test does itself by writing pods' status. As in any cluster, a new namespace's service account
`default` appears a moment after the namespace: pods created before it are refused.
"""

import json
import os
import secrets
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from testcluster import packages, programs
from testcluster.daemon import Daemon, free_ports
from testcluster.proc import ClusterError, run

KUBECTL_LIMIT = 60.0  # seconds
READ_LIMIT = 30.0  # seconds for what a test reads
PROBE_LIMIT = 2.0  # seconds for one readiness request
ACCOUNT_LIMIT = 20.0  # seconds until the controller manager has made the first service account
SERVICE_IP = "10.0.0.1"  # the first of --service-cluster-ip-range, which the API server takes for itself


def _certificates(folder: Path) -> None:
    """An authority, a certificate for the loopback, and the key that signs service-account tokens."""
    packages.ensure(packages.CERTIFICATES)
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    run(
        "openssl", "req", "-x509", *key, "-days", "2", "-subj", "/CN=everstep-test-ca",
        "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        "-keyout", str(folder / "ca.key"), "-out", str(folder / "ca.crt"),
    )  # fmt: skip
    extensions = folder / "extensions"
    extensions.write_text(
        f"subjectAltName=IP:127.0.0.1,IP:::1,IP:{SERVICE_IP},DNS:localhost,DNS:kubernetes.default.svc\n"
        "basicConstraints=CA:FALSE\nkeyUsage=digitalSignature\nextendedKeyUsage=serverAuth\nauthorityKeyIdentifier=keyid\n"
    )
    request = folder / "server.csr"
    run(
        "openssl",
        "req",
        *key,
        "-subj",
        "/CN=kube-apiserver",
        "-keyout",
        str(folder / "server.key"),
        "-out",
        str(request),
    )
    run(
        "openssl", "x509", "-req", "-days", "2", "-in", str(request), "-CA", str(folder / "ca.crt"),
        "-CAkey", str(folder / "ca.key"), "-CAcreateserial", "-extfile", str(extensions),
        "-out", str(folder / "server.crt"),
    )  # fmt: skip
    # Of the private forms, Kubernetes reads an elliptic curve's only in SEC 1, which is what ecparam writes.
    run("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(folder / "sa.key"))


class ControlPlane:
    """`url`, `ca_file`, `token` (an administrator's) and `kubeconfig` are all that a client needs."""

    def __init__(self, folder: Path, api_server: Path | None = None, flags: tuple[str, ...] = ()) -> None:
        """`api_server`: another program than its own. `flags`: more of the API server's."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._etcd_port, self._peer_port, self._port, self._manager_port = free_ports(4)
        self.url = f"https://127.0.0.1:{self._port}"
        self.ca_file = folder / "ca.crt"
        self.token = secrets.token_hex(16)
        self.kubeconfig = folder / "kubeconfig"
        self._programs, self._flags = programs.control_plane(), flags
        self._programs |= {} if api_server is None else {"kube-apiserver": api_server}
        _certificates(folder)
        self._write_files()
        self.etcd = self._make_etcd()
        self.apiserver = self._make_apiserver()
        self.controller_manager = self._make_controller_manager()

    def _write_files(self) -> None:
        (self.folder / "tokens.csv").write_text(f"{self.token},admin,admin,system:masters\n")
        (self.folder / "tokens.csv").chmod(0o600)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [
                {"name": "test", "cluster": {"server": self.url, "certificate-authority": str(self.ca_file)}},
            ],
            "users": [{"name": "admin", "user": {"token": self.token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        }
        self.kubeconfig.write_text(json.dumps(config, indent=1))  # JSON is YAML

    def _make_etcd(self) -> Daemon:
        client, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._peer_port}"

        def answers() -> bool:
            with urllib.request.urlopen(f"{client}/health", timeout=PROBE_LIMIT) as reply:
                return bool(reply.status == 200)

        argv = [
            str(self._programs["etcd"]), "--data-dir", str(self.folder / "etcd"), "--log-level=warn",
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
            "--unsafe-no-fsync",  # nothing here has to survive a power cut
        ]  # fmt: skip
        return Daemon(argv, self.folder / "etcd.log", answers)

    def _make_apiserver(self) -> Daemon:
        folder = self.folder
        argv = [
            str(self._programs["kube-apiserver"]),
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._port}",
            "--endpoint-reconciler-type=none",  # the loopback may not be the address of a Service
            f"--tls-cert-file={folder / 'server.crt'}",
            f"--tls-private-key-file={folder / 'server.key'}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder / 'sa.key'}",
            f"--service-account-signing-key-file={folder / 'sa.key'}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--allow-privileged=true",
            "--profiling=false",
            "--shutdown-delay-duration=0s",
            *self._flags,
        ]
        return Daemon(argv, folder / "kube-apiserver.log", self._ready)

    def _make_controller_manager(self) -> Daemon:
        folder = self.folder
        argv = [
            str(self._programs["kube-controller-manager"]),
            f"--kubeconfig={self.kubeconfig}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._manager_port}",
            f"--cert-dir={folder / 'manager'}",
            "--leader-elect=false",
            # It changes pods that are bound to nodes without an object, as tests bind theirs, after a minute: on a
            # busy machine a test takes so long.
            "--controllers=*,-pod-garbage-collector-controller",
            f"--service-account-private-key-file={folder / 'sa.key'}",
            f"--root-ca-file={self.ca_file}",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            "--profiling=false",
        ]
        context = ssl._create_unverified_context()

        def answers() -> bool:
            address = f"https://127.0.0.1:{self._manager_port}/healthz"
            with urllib.request.urlopen(address, timeout=PROBE_LIMIT, context=context) as reply:
                return bool(reply.status == 200)

        return Daemon(argv, folder / "kube-controller-manager.log", answers)

    def get(self, path: str, seconds: float = READ_LIMIT) -> bytes:
        """Body of a GET as the administrator, who waits for it for so long. Raises `OSError` (`HTTPError` for a status
        of 400 and above)."""
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.token}"})
        context = ssl.create_default_context(cafile=str(self.ca_file))
        with urllib.request.urlopen(request, timeout=seconds, context=context) as reply:
            return bytes(reply.read())

    def _ready(self) -> bool:
        return self.get("/readyz", PROBE_LIMIT) == b"ok"

    def start(self) -> None:
        """Start all three; returns when pods can be created in the namespace `default`."""
        self.etcd.start()
        self.apiserver.start()
        self.controller_manager.start()
        deadline = time.monotonic() + ACCOUNT_LIMIT
        while True:
            try:
                self.get("/api/v1/namespaces/default/serviceaccounts/default")
                return
            except urllib.error.HTTPError as error:
                if error.code != 404 or time.monotonic() > deadline:
                    raise ClusterError(f"no service account default/default: {error}") from error
            time.sleep(0.05)

    def stop(self) -> None:
        for daemon in (self.controller_manager, self.apiserver, self.etcd):
            daemon.kill()  # nothing of it is used again, and the API server takes seconds to end politely

    def stop_apiserver(self) -> None:
        """End the API server at once: clients' connections break. `start_apiserver` brings it back with its data."""
        self.apiserver.kill()

    def start_apiserver(self) -> None:
        """The controller manager begins anew too: its watches would wait up to half a minute before they look again,
        and a namespace has no service account until then."""
        self.controller_manager.kill()
        self.apiserver.start()
        self.controller_manager.start()

    def pause_apiserver(self) -> None:
        """Freeze the API server: connections stay open and nothing answers, as behind a network that swallows."""
        self.apiserver.pause()

    def resume_apiserver(self) -> None:
        self.apiserver.resume()

    def kubectl(self, *arguments: str, input: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl as the administrator; the caller looks at `returncode`, `stdout` and `stderr`."""
        return kubectl(self.kubeconfig, *arguments, input=input)


def kubectl(kubeconfig: Path, *arguments: str, input: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run kubectl against the cluster of `kubeconfig`, with output as text."""
    return subprocess.run(
        [str(programs.server("kubectl")), "--kubeconfig", str(kubeconfig), *arguments],
        input=input or "",
        capture_output=True,
        text=True,
        timeout=KUBECTL_LIMIT,
        check=False,
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
    )
