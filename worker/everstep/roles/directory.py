"""Where a hub is: one object below the checkpoint URL, because that is what all pods of a job can read already.

A pod that is replaced has another address, and its followers live on. So the address is looked up anew after each lost
connection. The object's name has the job's UID, so that a job never reads the words of another one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from everstep.contract import env
from everstep.roles.wire import RolesError
from everstep.storage import NotFound, ObjectStore, RetryingStore, open_store

LOCAL_ADDRESS = "PET_LOCAL_ADDR"  # the pod's address, which the operator sets
NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Address:
    """`token`: whoever may read the checkpoints may connect, and nobody else."""

    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class Over:
    """The hub has ended its work; its followers may end too."""


class Directory:
    def __init__(self, store: ObjectStore, name: str, job_uid: str) -> None:
        self._store = store
        self._object = f"roles/{name}-{job_uid or 'alone'}.json"

    @property
    def address(self) -> str:
        return f"{self._store.url}/{self._object}"

    def write(self, value: Address | Over) -> None:
        match value:
            case Address(host, port, token):
                body: dict[str, object] = {"host": host, "port": port, "token": token}
            case Over():
                body = {"over": True}
        self._store.put(self._object, json.dumps(body).encode())

    def read(self) -> Address | Over | None:
        """None: no hub has begun. Raises `RolesError` if the object is none of ours."""
        try:
            body = json.loads(self._store.get(self._object))
            return Over() if body.get("over") else Address(str(body["host"]), int(body["port"]), str(body["token"]))
        except NotFound:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise RolesError(f"{self.address} cannot be read as a hub's address ({e}): delete it") from e


def directory(url: str | os.PathLike[str] | None, name: str, environ: Mapping[str, str] = os.environ) -> Directory:
    """Raises `RolesError` for a name that no object can have, and in a process that is part of a world; `StoreUnusable`
    for a URL that cannot be used."""
    if NAME.fullmatch(name) is None:
        raise RolesError(
            f"name={name!r}: a hub's name has lower-case letters, digits and '-' inside, such as 'learner'"
        )
    if env.AGENT_SOCKET in environ or "RANK" in environ:
        raise RolesError(
            "this process was started by everstep-run or torchrun, whose processes are one world and are stopped "
            "together: start a script with roles by `python`, as in `command: [python, train.py]`"
        )
    store = open_store(os.fspath(url) if url is not None else environ.get(env.CHECKPOINT_URL, ""))
    return Directory(RetryingStore(store), name, environ.get(env.JOB_UID, ""))
