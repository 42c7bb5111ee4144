"""Real etcd on the loopback, or on a test's own network: one member or several, plain or with TLS and users."""

from __future__ import annotations

import json
import ssl
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.network.ports import Ports
from testcluster import programs
from testcluster.daemon import Daemon
from testcluster.proc import run


class EtcdCluster:
    """`urls[i]` and `members[i]` are one member."""

    def __init__(self, folder: Path, size: int, *, tls: bool = False, host: str = "127.0.0.1") -> None:
        self.folder, self.tls = folder, tls
        folder.mkdir(parents=True, exist_ok=True)
        self._ports = Ports()
        ports = [self._ports.take() for _ in range(2 * size)]
        scheme = "https" if tls else "http"
        self.urls = tuple(f"{scheme}://{host}:{port}" for port in ports[:size])
        peers = [f"http://127.0.0.1:{port}" for port in ports[size:]]
        names = [f"m{i}" for i in range(size)]
        everyone = ",".join(f"{name}={peer}" for name, peer in zip(names, peers, strict=True))
        if tls:
            certificates(folder)
        self.members = [self._member(*one, everyone) for one in zip(names, self.urls, peers, strict=True)]

    def _member(self, name: str, url: str, peer: str, everyone: str) -> Daemon:
        argv = [
            str(programs.server("etcd")), "--name", name, "--data-dir", str(self.folder / name), "--log-level=warn",
            "--listen-client-urls", url, "--advertise-client-urls", url,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", everyone,
            "--unsafe-no-fsync",
        ]  # fmt: skip
        if self.tls:
            argv += [
                "--cert-file", str(self.folder / "server.crt"), "--key-file", str(self.folder / "server.key"),
                "--trusted-ca-file", str(self.folder / "ca.crt"), "--client-cert-auth",
            ]  # fmt: skip
        return Daemon(argv, self.folder / f"{name}.log", lambda: self.post("/v3/maintenance/status", {}, url) != {})

    def start(self) -> None:
        for member in self.members:
            member.start(wait=False)
        for member in self.members:
            member.wait()

    def stop(self) -> None:
        for member in self.members:
            member.kill()
        self._ports.close()

    def context(self) -> ssl.SSLContext | None:
        if not self.tls:
            return None
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        context.load_cert_chain(str(self.folder / "client.crt"), str(self.folder / "client.key"))
        return context

    def post(
        self, path: str, body: Mapping[str, Any], url: str | None = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """One call of etcd's own API, as an administrator makes it."""
        request = urllib.request.Request((url or self.urls[0]) + path, json.dumps(body).encode(), dict(headers or {}))
        with urllib.request.urlopen(request, timeout=30, context=self.context()) as reply:
            return dict(json.loads(reply.read()))

    def leader(self) -> int:
        """The index of the member that leads; waits while they elect one."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for index, url in enumerate(self.urls):
                status = self.post("/v3/maintenance/status", {}, url)
                if status["leader"] == status["header"]["member_id"]:
                    return index
            time.sleep(0.05)
        raise AssertionError("no member leads")


def certificates(folder: Path) -> None:
    """A CA, a server's certificate for the loopback and a client's, for two days."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    run(
        "openssl", "req", "-x509", *key, "-days", "2", "-subj", "/CN=everstep-test-ca",
        "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        "-keyout", str(folder / "ca.key"), "-out", str(folder / "ca.crt"),
    )  # fmt: skip
    for name, use in (("server", "serverAuth"), ("client", "clientAuth")):
        extensions = folder / f"{name}.ext"
        # etcd's gateway is a client of its own server with the server's certificate.
        uses = "serverAuth,clientAuth" if use == "serverAuth" else use
        extensions.write_text(
            f"subjectAltName=IP:127.0.0.1,DNS:localhost\nbasicConstraints=CA:FALSE\nextendedKeyUsage={uses}\n"
            "authorityKeyIdentifier=keyid\n"
        )
        request = folder / f"{name}.csr"
        run(
            # With users enabled, the gateway refuses a client's certificate that has a common name.
            "openssl", "req", *key, "-subj", "/O=everstep" if name == "client" else f"/CN=everstep-{name}",
            "-keyout", str(folder / f"{name}.key"), "-out", str(request),
        )  # fmt: skip
        run(
            "openssl", "x509", "-req", "-days", "2", "-in", str(request), "-CA", str(folder / "ca.crt"),
            "-CAkey", str(folder / "ca.key"), "-CAcreateserial", "-extfile", str(extensions),
            "-out", str(folder / f"{name}.crt"),
        )  # fmt: skip
