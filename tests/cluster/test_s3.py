"""The S3 server keeps the promises on which the commit log stands: conditional writes, and data that survives it."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import boto3
import pytest
from botocore.exceptions import ClientError

from testcluster.s3 import S3Server

pytestmark = pytest.mark.s3
WRITERS = 20


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    return s3_server.bucket(f"b{uuid.uuid4().hex[:8]}")


def test_twenty_writers_create_one_key_and_one_wins(s3_server: S3Server, bucket: str) -> None:
    clients = [s3_server.client() for _ in range(WRITERS)]
    start = threading.Barrier(WRITERS)

    def write(number: int) -> int | None:
        start.wait(timeout=30)
        try:
            clients[number].put_object(Bucket=bucket, Key="log/1.json", Body=str(number).encode(), IfNoneMatch="*")
        except ClientError as error:
            if error.response["Error"]["Code"] != "PreconditionFailed":
                raise
            return None
        return number

    with ThreadPoolExecutor(WRITERS) as pool:
        winners = [number for number in pool.map(write, range(WRITERS)) if number is not None]
    assert len(winners) == 1
    assert s3_server.client().get_object(Bucket=bucket, Key="log/1.json")["Body"].read() == str(winners[0]).encode()


def test_write_with_an_old_etag_is_refused(s3_server: S3Server, bucket: str) -> None:
    client = s3_server.client()
    old = client.put_object(Bucket=bucket, Key="k", Body=b"1")["ETag"]
    client.put_object(Bucket=bucket, Key="k", Body=b"2")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket=bucket, Key="k", Body=b"3", IfMatch=old)
    assert client.get_object(Bucket=bucket, Key="k")["Body"].read() == b"2"


def test_server_killed_and_started_has_its_objects_at_the_same_address(s3_server: S3Server, bucket: str) -> None:
    s3_server.client().put_object(Bucket=bucket, Key="a/b", Body=b"kept")
    endpoint = s3_server.endpoint
    s3_server.kill()
    s3_server.start()
    assert s3_server.endpoint == endpoint
    assert s3_server.client().get_object(Bucket=bucket, Key="a/b")["Body"].read() == b"kept"


def test_environment_alone_is_enough_for_a_client(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    boto3.session.Session().client("s3").put_object(Bucket=bucket, Key="from-environment", Body=b"x")
    listed = s3_server.client().list_objects_v2(Bucket=bucket)["Contents"]
    assert [entry["Key"] for entry in listed] == ["from-environment"]
