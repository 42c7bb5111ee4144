"""The methods of `Checkpointer` for the commits below a URL, which are safe while another process trains there.

Invariant: nothing here takes the log, or changes what a commit holds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from everstep.checkpoint.format.manifest import CommitRecord
from everstep.checkpoint.retention import pins
from everstep.checkpoint.retention.catalog import Catalog, Found
from everstep.checkpoint.retention.late_metrics import all_metrics
from everstep.checkpoint.save import attachments
from everstep.storage import ObjectStore


class Commits:
    """The commits of a store. `keep_last`: of how many `gc` leaves the newest."""

    def __init__(self, store: ObjectStore, keep_last: int) -> None:
        self._store = store
        self._catalog = Catalog(store)
        self._keep_last = keep_last
        self._restored_id: str | None = None  # the save that was restored

    def put_beside(self, name: str, data: bytes) -> str:
        """Write an object that belongs to no commit, `name` below the URL. Returns where it is. Any rank and thread."""
        self._store.put(name, data)
        return f"{self._store.url.rstrip('/')}/{name}"

    def list(self) -> tuple[Found, ...]:
        """The commits that have their data, newest first. Like what follows, it takes nothing: any process may ask."""
        return self._catalog.list()

    def latest(self) -> Found | None:
        """The newest commit in the log, of whatever writer. Looks at the log alone."""
        record = self._catalog.latest()
        return Found.of(record) if record else None

    def verify(self, step: int | None = None, *, n: int | None = None) -> tuple[str, ...]:
        """The problems of the shards of the newest commit, that of `step`, or record `n`; each text names a file. Empty
        if the commit is whole, or if there is no commit at all. Reads every byte."""
        if step is None and n is None and self._catalog.latest() is None:
            return ()
        return self._catalog.verify(step, n)

    def newest(self) -> int | None:
        """The step of the newest commit, of whatever writer. Not collective; raises `StorageError`."""
        found = self._catalog.latest()
        return found.step if found is not None else None

    def pin(self, step: int | None = None, *, n: int | None = None) -> Found:
        """Keep the newest commit, that of `step`, or record `n`, until `unpin`: no clean-up deletes it, whoever cleans.
        Raises `CheckpointError` if there is none, or its deletion has begun."""
        return self._found(self._catalog.pin(step, n))

    def unpin(self, step: int | None = None, *, n: int | None = None) -> Found:
        """Take a pin back, and what `Keep` holds the commit by beyond the newest ones. A tag stays."""
        return self._found(self._catalog.unpin(step, n))

    def tag(self, tag: str, step: int | None = None, *, n: int | None = None) -> Found:
        """Call the newest commit, that of `step`, or record `n`, by a name, and keep it until `untag`. The commit that
        had the name before loses it. Raises `CheckpointError` as `pin` does, and for a tag that is no name."""
        return self._found(self._catalog.tag(tag, step, n))

    def untag(self, tag: str) -> None:
        """Take a tag away. Raises `NoCommit` if there is none."""
        self._catalog.untag(tag)

    def tagged(self, tag: str) -> Found:
        """The commit of a tag: `restore(state, n=checkpointer.tagged("best-eval").n)`. Raises `NoCommit`."""
        return self._found(self._catalog.tagged(tag))

    def _found(self, record: CommitRecord) -> Found:
        return Found.of(record, pins.holds(self._store), later=all_metrics(self._store, record))

    def gc(self) -> tuple[str, ...]:
        """Clean up now, as is done after each commit; the save ids of what was deleted."""
        return tuple(delete.save_id for delete in self._catalog.gc(self._keep_last))

    def export(
        self, path: str | os.PathLike[str], step: int | None = None, *, format: str = "safetensors",
        keys: Iterable[str] | None = None,
    ) -> tuple[str, ...]:  # fmt: skip
        """Write a commit (the newest) as files that other tools open: "safetensors", "huggingface", "torch" or "dcp";
        the files' names. See `outgoing.export_as`, and docs/reference/checkpoint.md."""
        from everstep.checkpoint.convert.outgoing import export_as  # noqa: PLC0415  few runs export

        return export_as(self._store, self._catalog.find(step), path, format, keys)

    def attached(self, name: str) -> bytes | None:
        """The attachment of the commit that `restore` has loaded. Not collective."""
        return attachments.read(self._store, self._restored_id, name) if self._restored_id else None

    def attach_to_restored(self, name: str, data: bytes) -> None:
        """Put `data` beside the commit that `restore` has loaded, now."""
        if self._restored_id:
            attachments.write(self._store, self._restored_id, name, data)
