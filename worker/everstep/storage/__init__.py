"""Bytes under names, with a true conditional create: all that the checkpoint engine knows of the outside world.

Knows nothing of checkpoints, torch or jobs. Invariant: an object is either whole under its name, or not there.
"""

from everstep.storage.backends.memory import MemoryStore
from everstep.storage.base import Capabilities, ObjectInfo, ObjectStore, check_name
from everstep.storage.errors import (
    AlreadyExists,
    InvalidName,
    NotFound,
    RetryableError,
    StorageError,
    StoreUnusable,
    TerminalError,
    Throttled,
    Truncated,
    Unsynced,
)
from everstep.storage.opening import open_for_command, open_store
from everstep.storage.probe import probe
from everstep.storage.retry import RetryingStore, RetryPolicy
from everstep.storage.upload import Data, ObjectWriter, Upload

__all__ = [
    "AlreadyExists",
    "Capabilities",
    "Data",
    "InvalidName",
    "MemoryStore",
    "NotFound",
    "ObjectInfo",
    "ObjectStore",
    "ObjectWriter",
    "RetryPolicy",
    "RetryableError",
    "RetryingStore",
    "StorageError",
    "StoreUnusable",
    "TerminalError",
    "Throttled",
    "Truncated",
    "Unsynced",
    "Upload",
    "check_name",
    "open_for_command",
    "open_store",
    "probe",
]
