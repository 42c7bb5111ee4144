"""A pod's volumes as folders on this machine.

Files are replaced as a whole, by a rename: a reader sees the old or the new one. Invariant: all files are below the
pod's own folder, and removed with it. A claim's are not: its folder is the user's, and all pods that name it share it.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from everstep_local.kubelet.environment import PathMap
from everstep_local.kubelet.sources import NotStartable, PodFacts, Sources

# (namespace, service account, pod name, pod UID, audience, seconds of validity) -> token
TokenIssuer: TypeAlias = Callable[[str, str, str, str, str, int], "str | Awaitable[str]"]

TOKEN_SECONDS = 3600  # Kubernetes' default for a projected token
REFRESH_AT = 0.8  # of its life, as a kubelet does it
SUPPORTED = "emptyDir, secret, configMap, downwardAPI, projected and persistentVolumeClaim"


@dataclass(frozen=True, slots=True)
class Token:
    """A file that holds a token, and when (in seconds of the clock) it is to be replaced."""

    path: Path
    audience: str
    seconds: int
    refresh_at: float


def failed_mount(message: str) -> NotStartable:
    """The error of a failed mount. A kubelet reports it as an event, and leaves the container in ContainerCreating.
    Here it is the container's waiting state, which the operator shows in the job's status."""
    return NotStartable(f"FailedMount: {message}")


class Volumes:
    """The volumes of one pod, below `folder`; claims have folders below `claims`, by name."""

    def __init__(self, folder: Path, claims: Path | None, facts: PodFacts, issue: TokenIssuer) -> None:
        self._folder = folder
        self._claims = claims
        self._facts = facts
        self._issue = issue
        self._claimed: dict[str, Path] = {}  # by the volume's name

    async def make(self, sources: Sources, now: float) -> tuple[Token, ...]:
        """Make all volumes of the pod's spec. Returns the tokens among them. Raises NotStartable and KubeError."""
        tokens: list[Token] = []
        for volume in self._facts.pod.spec.get("volumes") or ():
            name = str(volume.get("name", ""))
            folder = self._folder / name
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                match {k: v for k, v in volume.items() if k != "name"}:
                    case {"emptyDir": _}:
                        pass
                    case {"secret": ref}:
                        await self._keys(folder, ref, sources, secret=True)
                    case {"configMap": ref}:
                        await self._keys(folder, ref, sources, secret=False)
                    case {"downwardAPI": ref}:
                        self._fields(folder, ref)
                    case {"persistentVolumeClaim": ref} if self._claims is not None:
                        claim = self._below(self._claims, str(ref.get("claimName", "")))
                        claim.mkdir(parents=True, exist_ok=True)
                        self._claimed[name] = claim
                    case {"projected": ref}:
                        tokens += await self._projected(folder, ref, sources, now)
                    case other:
                        kinds = ", ".join(sorted(other)) or "nothing"
                        raise NotStartable(
                            f"{kinds} does not exist in local mode; use {SUPPORTED}, or a path by itself"
                        )
            except NotStartable as e:
                raise failed_mount(f"volume {name!r}: {e.message}") from e
        return tuple(tokens)

    def paths(self, container: Mapping[str, Any]) -> PathMap:
        """The folders of the container's mount paths. Raises NotStartable."""
        folders: dict[str, Path] = {}
        names = {str(v.get("name")) for v in self._facts.pod.spec.get("volumes") or ()}
        for mount in container.get("volumeMounts") or ():
            name, where = str(mount.get("name", "")), str(mount.get("mountPath", ""))
            if name not in names:
                raise failed_mount(f"volumeMounts names the volume {name!r}, which the pod does not have")
            if not where.rstrip("/") or mount.get("subPathExpr"):
                raise failed_mount(f"volume {name!r}: local mode can mount it neither at / nor with a subPathExpr")
            folder = self._below(self._claimed.get(name, self._folder / name), str(mount.get("subPath") or ""))
            if mount.get("subPath") and not folder.exists():
                folder.mkdir(parents=True, mode=0o700)
            folders[where] = folder
        return PathMap(folders)

    async def issue(self, token: Token, now: float) -> Token:
        """A fresh token in its file. Raises what the issuer raises."""
        meta = self._facts.pod.metadata
        account = str(self._facts.pod.spec.get("serviceAccountName") or "default")
        made = self._issue(meta.namespace, account, meta.name, meta.uid, token.audience, token.seconds)
        text = made if isinstance(made, str) else await made
        _write(token.path, text.encode(), 0o600)
        return Token(token.path, token.audience, token.seconds, now + REFRESH_AT * token.seconds)

    async def _projected(self, folder: Path, ref: Mapping[str, Any], sources: Sources, now: float) -> list[Token]:
        tokens = []
        for source in ref.get("sources") or ():
            match source:
                case {"serviceAccountToken": wanted}:
                    path = self._below(folder, str(wanted.get("path", "")))
                    seconds = int(wanted.get("expirationSeconds") or TOKEN_SECONDS)
                    tokens.append(await self.issue(Token(path, str(wanted.get("audience") or ""), seconds, now), now))
                case {"secret": inner}:
                    await self._keys(folder, inner, sources, secret=True)
                case {"configMap": inner}:
                    await self._keys(folder, inner, sources, secret=False)
                case {"downwardAPI": inner}:
                    self._fields(folder, inner)
                case _:
                    raise NotStartable(f"projected source {', '.join(sorted(source))} does not exist in local mode")
        return tokens

    async def _keys(self, folder: Path, ref: Mapping[str, Any], sources: Sources, *, secret: bool) -> None:
        values = await sources.values(ref, secret=secret)
        default = int(ref.get("defaultMode") or 0o644)
        items = ref.get("items") or [{"key": key, "path": key} for key in values]
        for item in items:
            key = str(item.get("key", ""))
            if key not in values:
                if ref.get("optional"):
                    continue
                raise NotStartable(f"references non-existent key {key}")
            _write(self._below(folder, str(item.get("path", ""))), values[key], int(item.get("mode") or default))

    def _fields(self, folder: Path, ref: Mapping[str, Any]) -> None:
        for item in ref.get("items") or ():
            field = (item.get("fieldRef") or {}).get("fieldPath")
            if field is None:
                raise NotStartable("downwardAPI items other than fieldRef do not exist in local mode")
            _write(self._below(folder, str(item.get("path", ""))), self._facts.field(str(field)).encode(), 0o644)

    @staticmethod
    def _below(folder: Path, path: str) -> Path:
        resolved = Path(os.path.normpath(folder / path))
        if resolved != folder and folder not in resolved.parents:
            raise NotStartable(f"path {path!r} leads out of the volume")
        return resolved


def _write(path: Path, data: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_name(f".{path.name}.new")
    # Group and others get no rights, because a container has no users and groups of its own here.
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    new.chmod((mode & 0o700) | 0o600)
    new.replace(path)
