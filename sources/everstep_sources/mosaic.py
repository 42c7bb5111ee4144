"""MosaicML Streaming's MDS shards, read by its `MDSReader`.

The index names the shards, their samples, sizes and checksums. Nothing of the library's downloading, partitioning or
shared memory is used. Invariant: the index alone decides what is a sample's number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from everstep.data.errors import DataError, DatasetUnusable
from everstep.data.shards import Shard, ShardedDataset
from everstep_sources.cache import Cache
from everstep_sources.files import Files, Opened, Opener, library, sharded

INDEX = "index.json"


def mds(
    root: str,
    *,
    split: str | None = None,
    cache: Cache | None = None,
    transform: Callable[[dict[str, Any]], Any] | None = None,
    open_limit: int = 16,
    allow_unsafe_types: bool = False,
) -> ShardedDataset:
    """The MDS dataset at `root` (a folder or URL that holds `index.json`), as what `MDSWriter` wrote: each sample the
    mapping that was written, through `transform`.

    `split`: a folder below `root`. `cache`: needed for a URL, and for shards that are compressed. `open_limit`: shards
    that a process holds open. `allow_unsafe_types`: read columns that were pickled, which can run any code; otherwise
    they are refused. Raises DatasetUnusable, CacheError, DataError.
    """
    _library()
    files = Files(f"{root.rstrip('/')}/{split}" if split else root.rstrip("/"), cache)
    files.check()
    entries = _entries(files)
    opener = _OpenMds(files, entries)
    for name, entry in entries.items():
        opener.check(name, entry, allow_unsafe_types)
    index = json.dumps(list(entries.values()), sort_keys=True).encode()
    return sharded(
        [Shard(name, entry["samples"]) for name, entry in entries.items()],
        opener,
        transform=transform,
        open_limit=open_limit,
        identity=hashlib.blake2b(index, digest_size=16).hexdigest(),
        sizes={name: entry["raw_data"]["bytes"] for name, entry in entries.items()},
    )


class _OpenMds(Opener):
    def __init__(self, files: Files, entries: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(files)
        self._entries = dict(entries)

    def check(self, name: str, entry: Mapping[str, Any], allow_unsafe_types: bool) -> None:
        try:
            self._reader("", "", entry).validate(allow_unsafe_types)
        except ValueError as e:
            raise DatasetUnusable(f"{self.files.root}, shard {name}: {e}") from e
        if entry["zip_data"] and self.files.cache is None:
            raise DataError(
                f"{self.files.root}, shard {name} is compressed ({entry['compression']}): pass"
                " cache=everstep_sources.Cache('/a/local/folder', limit='20 GiB') to keep it unpacked"
            )

    def __call__(self, name: str) -> Sequence[Any]:
        entry = self._entries[name]
        raw, packed = entry["raw_data"], entry["zip_data"]
        stored = packed or raw
        url = str(PurePosixPath(name).with_name(PurePosixPath(stored["basename"]).name))
        file = self.files.hold(
            url,
            size=raw["bytes"],
            stored=stored["bytes"],
            version=json.dumps(stored, sort_keys=True),
            unpack=_Unpack(url, entry["compression"] if packed else None, stored.get("hashes") or {}),
            called=PurePosixPath(name).name,
        )
        reader = self._reader(str(file.path.parent), file.path.name, entry)
        return Opened(file, entry["samples"], reader.get_item)

    def _reader(self, folder: str, file: str, entry: Mapping[str, Any]) -> Any:
        return _library().reader_from_json(folder, None, {**entry, "raw_data": {**entry["raw_data"], "basename": file}})


class _Unpack:
    """From what is stored to the shard; checks the checksums that the index gives."""

    def __init__(self, name: str, compression: str | None, hashes: Mapping[str, str]) -> None:
        self._name, self._compression, self._hashes = name, compression, dict(hashes)

    def __call__(self, stored: bytes) -> bytes:
        from streaming.base.compression import decompress  # noqa: PLC0415  the library is optional
        from streaming.base.hashing import get_hash  # noqa: PLC0415

        for algorithm, wanted in self._hashes.items():
            if (actual := get_hash(algorithm, stored)) != wanted:
                raise DatasetUnusable(f"{self._name}: {algorithm} is {actual}, and the index says {wanted}")
        return decompress(self._compression, stored) if self._compression else stored


def _entries(files: Files) -> dict[str, dict[str, Any]]:
    """The index's entry for each shard that has samples, by the name of its file."""
    where = f"{files.root}/{INDEX}"
    try:
        index = json.loads(files.read(INDEX))
        version, listed = index["version"], index["shards"]
        entries = {entry["raw_data"]["basename"]: entry for entry in listed if entry["samples"]}
        formats = {entry["format"] for entry in listed}
        same = sum(entry["samples"] > 0 for entry in listed) == len(entries)
    except (ValueError, KeyError, TypeError) as e:
        raise DatasetUnusable(f"{where} is no index of MDS shards ({e!r})") from e
    if version != 2 or formats - {"mds"} or not same:
        raise DatasetUnusable(
            f"{where}: version {version}, formats {sorted(formats)}: version 2 with shards of format mds is expected,"
            " each with a name of its own. Convert others with streaming.MDSWriter"
        )
    if not entries:
        raise DatasetUnusable(f"{where}: no shard with samples")
    return entries


def _library() -> Any:
    return library("streaming.base.format", "mds() reads with MosaicML Streaming", "mosaicml-streaming")
