"""S3 servers for tests: versitygw, which enforces If-None-Match and If-Match as S3 does.

`Account` is how a client reaches one; `S3Server` is one on the loopback that a test may stop, kill and start again.
"""

import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testcluster import programs
from testcluster.daemon import Daemon, free_ports

REGION = "us-east-1"
ACCESS_KEY = "everstep-test"
SECRET_KEY = "everstep-test-secret"  # the same in manifests/s3.yaml; it guards nothing
PROBE_LIMIT = 2.0  # seconds


@dataclass(frozen=True, slots=True)
class Account:
    """Where a server is and how to sign for it."""

    endpoint: str
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY
    region: str = REGION

    @property
    def env(self) -> dict[str, str]:
        """What boto3, s3fs and other clients read from the environment."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
        }

    def client(self) -> Any:
        """A boto3 client: it reads objects as a third party would, not through the project's own code."""
        import boto3  # noqa: PLC0415 - the rest of this package runs before any virtual environment exists
        from botocore.config import Config  # noqa: PLC0415

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
            config=Config(
                s3={"addressing_style": "path"}, retries={"max_attempts": 1}, connect_timeout=5, read_timeout=20
            ),
        )

    def bucket(self, name: str) -> str:
        """Make sure of the bucket (through boto3: s3fs' own `mkdir` leaves none)."""
        client = self.client()
        if name not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
            client.create_bucket(Bucket=name)
        return name


class S3Server:
    """versitygw over a folder: objects are files there, so they survive its restarts and a test can read them."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.data.mkdir(parents=True, exist_ok=True)
        (port,) = free_ports(1)
        self.account = Account(f"http://127.0.0.1:{port}")
        argv = [str(programs.versitygw()), "--port", f"127.0.0.1:{port}", "--health", "/healthz", "--quiet"]
        argv += ["--access", self.account.access_key, "--secret", self.account.secret_key, "posix", str(self.data)]
        self.daemon = Daemon(argv, folder / "versitygw.log", self._answers)

    def _answers(self) -> bool:
        with urllib.request.urlopen(f"{self.endpoint}/healthz", timeout=PROBE_LIMIT) as reply:
            return bool(reply.status == 200)

    @property
    def endpoint(self) -> str:
        return self.account.endpoint

    @property
    def access_key(self) -> str:
        return self.account.access_key

    @property
    def secret_key(self) -> str:
        return self.account.secret_key

    @property
    def env(self) -> dict[str, str]:
        return self.account.env

    def client(self) -> Any:
        return self.account.client()

    def bucket(self, name: str) -> str:
        return self.account.bucket(name)

    def start(self) -> None:
        self.daemon.start()

    def stop(self) -> None:
        self.daemon.stop()

    def kill(self) -> None:
        self.daemon.kill()
