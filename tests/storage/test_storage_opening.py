"""What opening a store costs and refuses, before anything is sent anywhere."""

import subprocess
import sys

import pytest

from everstep.storage import ObjectStore, RetryingStore, open_store
from everstep.storage.faults import FaultStore

HEAVY = ("fsspec", "s3fs", "aiohttp", "botocore", "gcsfs", "grpc", "adlfs", "azure", "torch", "pytest")


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import everstep.storage",
        "import everstep.testing",
        "from everstep.storage import open_store; open_store('/tmp/x'); open_store('memory://x')",
    ],
)
def test_import_loads_nothing_that_a_url_has_not_asked_for(statement: str) -> None:
    assert loaded_after(statement) == set()


def test_s3_url_loads_no_other_backend() -> None:
    loaded = loaded_after("from everstep.storage import open_store; open_store('s3://bucket/x')")
    assert not loaded & {"gcsfs", "grpc", "adlfs", "azure", "torch"}


@pytest.mark.parametrize(
    ("url", "multipart", "writable"),
    [
        ("memory://x", True, True),
        ("/tmp/x", True, True),
        ("s3://bucket/x", True, True),
        ("gs://bucket/x", True, True),
        ("az://container/x", True, True),
        ("https://host/x", False, False),
        ("sftp://host/x", False, True),
    ],
)
def test_capabilities_say_what_a_scheme_offers(url: str, multipart: bool, writable: bool) -> None:
    store: ObjectStore = open_store(url, single_committer=url.startswith("sftp"))
    for wrapped in (store, RetryingStore(store), FaultStore(store)):
        found = wrapped.capabilities
        assert (found.multipart, found.writable) == (multipart, writable)
