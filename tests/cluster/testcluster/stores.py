"""Object stores for tests, each on the loopback: Google's and Azure's emulators, and an S3 that ignores conditions.

A Go module and two npm packages, found in the cache after the first run; nothing is installed anywhere else.
"""

import contextlib
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from testcluster import cache, programs, toolchains, versions
from testcluster.daemon import Daemon, free_ports
from testcluster.proc import run

NPM_LIMIT = 600.0  # seconds; azurite takes 60 on two cold cores
PROBE_LIMIT = 2.0  # seconds
BUCKET_LIMIT = 30.0  # seconds to make one
AZURE_ACCOUNT = "devstoreaccount1"
# The well-known key of the emulator; it guards nothing.
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CARELESS_KEY = "S3RVER"  # the server's only account, name and secret


def _npm(name: str, version: str, program: str) -> Path:
    """A program of an npm package, in a folder of its own."""

    def make(out: Path) -> None:
        run(
            str(toolchains.npm()), "install", "--no-audit", "--no-fund", "--omit=dev", "--ignore-scripts",
            "--prefix", str(out), f"{name}@{version}",
            env=toolchains.beside(toolchains.npm()),
            timeout=NPM_LIMIT,
            log=cache.logs() / f"npm-{name}.log",
        )  # fmt: skip

    return cache.artifact(name, (version,), make) / "node_modules" / ".bin" / program


def azurite() -> Path:
    return _npm("azurite", versions.AZURITE, "azurite-blob")


def s3rver() -> Path:
    return _npm("s3rver", versions.S3RVER, "s3rver")


class _Server:
    """A program that answers HTTP, whatever it answers, when it is ready."""

    def __init__(self, folder: Path, name: str) -> None:
        self.data = folder / "data"
        self.data.mkdir(parents=True, exist_ok=True)
        (self.port,) = free_ports(1)
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.daemon = Daemon(self.argv(), folder / f"{name}.log", self._answers, env={**os.environ, **self.settings()})

    def argv(self) -> list[str]:
        raise NotImplementedError

    def settings(self) -> dict[str, str]:
        """Environment variables of the server."""
        return {}

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=PROBE_LIMIT).close()
        except urllib.error.HTTPError:
            return True
        return True

    def start(self) -> None:
        self.daemon.start()

    def stop(self) -> None:
        self.daemon.stop()


class CarelessS3(_Server):
    """s3rver: accepts `If-None-Match` and ignores it, as some S3 look-alikes do."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "s3rver")

    def settings(self) -> dict[str, str]:
        return toolchains.beside(toolchains.npm())

    def argv(self) -> list[str]:
        return [str(s3rver()), "-d", str(self.data), "-a", "127.0.0.1", "-p", str(self.port), "--silent"]

    def env(self) -> dict[str, str]:
        """What clients read from the environment."""
        return {
            "AWS_ACCESS_KEY_ID": CARELESS_KEY,
            "AWS_SECRET_ACCESS_KEY": CARELESS_KEY,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def bucket(self, name: str) -> str:
        (self.data / name).mkdir(exist_ok=True)  # its buckets are folders
        return name


class GcsServer(_Server):
    """fake-gcs-server: Google Cloud Storage's JSON interface, with generations and their conditions."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "fake-gcs-server")

    def argv(self) -> list[str]:
        here = f"127.0.0.1:{self.port}"
        return [
            str(programs.fake_gcs_server()), "-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port),
            "-external-url", f"http://{here}", "-public-host", here, "-backend", "filesystem",
            "-filesystem-root", str(self.data), "-log-level", "warn",
        ]  # fmt: skip

    @property
    def options(self) -> dict[str, Any]:
        """What gcsfs is to be made with."""
        return {"token": "anon", "endpoint_url": self.endpoint, "project": "everstep-tests"}

    def bucket(self, name: str) -> str:
        request = urllib.request.Request(
            f"{self.endpoint}/storage/v1/b?project=everstep-tests",
            data=b'{"name": "%s"}' % name.encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            urllib.request.urlopen(request, timeout=BUCKET_LIMIT).close()
        except urllib.error.HTTPError as e:
            if e.code != 409:  # it exists
                raise
        return name


class AzureServer(_Server):
    """Azurite: Azure Blob Storage, by its makers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "azurite")

    def settings(self) -> dict[str, str]:
        return toolchains.beside(toolchains.npm())

    def argv(self) -> list[str]:
        return [
            str(azurite()), "--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--location", str(self.data),
            "--silent", "--skipApiVersionCheck", "--disableTelemetry",
        ]  # fmt: skip

    @property
    def options(self) -> dict[str, Any]:
        """What adlfs is to be made with."""
        return {
            "connection_string": f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};"
            f"BlobEndpoint={self.endpoint}/{AZURE_ACCOUNT};"
        }

    def bucket(self, name: str) -> str:
        """Make sure of the container."""
        from azure.core.exceptions import ResourceExistsError  # noqa: PLC0415 - as in s3.py
        from azure.storage.blob import BlobServiceClient  # noqa: PLC0415

        exists = contextlib.suppress(ResourceExistsError)
        with BlobServiceClient.from_connection_string(self.options["connection_string"]) as client, exists:
            client.create_container(name)
        return name
