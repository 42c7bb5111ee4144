"""litdata's chunks, each read by the library's own `PyTreeLoader`.

The index names the chunks, their items, sizes and how an item is laid out. Nothing of the library's downloading,
prefetching or distribution is used. Invariant: the index alone decides what is a sample's number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.data.errors import DataError, DatasetUnusable
from everstep.data.shards import Shard, ShardedDataset
from everstep.torch_private import libraries
from everstep_sources.cache import Cache
from everstep_sources.files import Files, Opened, Opener, library, sharded

INDEX = "index.json"


def litdata(
    root: str,
    *,
    cache: Cache | None = None,
    transform: Callable[[Any], Any] | None = None,
    open_limit: int = 16,
    allow_unsafe_types: bool = False,
) -> ShardedDataset:
    """What `litdata.optimize` wrote to `root` (a folder or URL that holds `index.json`): each sample as it was
    returned to it, through `transform`.

    `cache`: needed for a URL, and for chunks that are compressed whole (`compression_level="chunk"`). `open_limit`:
    chunks that a process holds open. `allow_unsafe_types`: read values that were pickled, which can run any code;
    otherwise they are refused. Refused by name: streams of tokens (`TokensLoader`), and chunks that are encrypted.
    Raises DatasetUnusable, CacheError, DataError.
    """
    _library()
    files = Files(root.rstrip("/"), cache)
    files.check()
    where = f"{files.root}/{INDEX}"
    try:
        index = json.loads(files.read(INDEX))
        config, chunks = index["config"], [c for c in index["chunks"] if c["chunk_size"]]
        entries = {chunk["filename"]: chunk for chunk in chunks}
        formats = list(config["data_format"])
    except (ValueError, KeyError, TypeError) as e:
        raise DatasetUnusable(f"{where} is no index of litdata chunks ({e!r})") from e
    if not chunks or len(entries) < len(chunks):
        raise DatasetUnusable(f"{where}: {len(chunks)} chunks with items, {len(entries)} names: one each is expected")
    _check(where, config, formats, files, allow_unsafe_types)
    return sharded(
        [Shard(name, chunk["chunk_size"]) for name, chunk in entries.items()],
        _OpenChunk(files, config, entries),
        transform=transform,
        open_limit=open_limit,
        identity=hashlib.blake2b(json.dumps([config, chunks], sort_keys=True).encode(), digest_size=16).hexdigest(),
        sizes={name: chunk["chunk_bytes"] for name, chunk in entries.items()},
    )


def _check(where: str, config: Mapping[str, Any], formats: list[str], files: Files, allow_unsafe: bool) -> None:
    if config.get("item_loader") not in (None, "PyTreeLoader"):
        raise DatasetUnusable(
            f"{where} was written for {config['item_loader']}, whose samples are cut from a stream of tokens: write"
            " samples of one length with litdata.optimize, without item_loader="
        )
    if config.get("encryption"):
        raise DatasetUnusable(f"{where}: its chunks are encrypted: write them without encryption=")
    if any(name.split(":")[0] == "pickle" for name in formats) and not allow_unsafe:
        raise DatasetUnusable(
            f"{where}: samples hold pickled values ({formats}), and reading those can run any code: pass"
            " allow_unsafe_types=True if you trust who wrote them"
        )
    codec = config.get("compression")
    if codec and codec not in _codecs():
        raise DatasetUnusable(
            f"{where}: chunks are compressed with {codec}, which the litdata that is installed here does not unpack:"
            " pip install zstd, or write them with compression='zstd'"
        )
    if _is_packed_whole(config) and files.cache is None:
        raise DataError(
            f"{where}: chunks are compressed whole ({codec}): pass cache=everstep_sources.Cache('/a/local/folder',"
            " limit='20 GiB') to keep them unpacked, or write them with compression_level='batch'"
        )


class _OpenChunk(Opener):
    def __init__(self, files: Files, config: Mapping[str, Any], entries: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(files)
        self._config, self._entries = dict(config), dict(entries)

    def __call__(self, name: str) -> Sequence[Any]:
        chunk = self._entries[name]
        codec = self._config["compression"] if _is_packed_whole(self._config) else None
        chunk_file = self.files.hold(
            name,
            size=chunk["chunk_bytes"],  # of the chunk unpacked, if it is compressed whole
            version=json.dumps([chunk, codec] if codec else chunk, sort_keys=True),
            unpack=_Unpack(name, codec) if codec else None,
            called=name.replace(f".{codec}", "") if codec else None,
        )
        loader = self._loader(chunk)

        def read(index: int) -> Any:
            return loader.load_item_from_chunk(index, 0, str(chunk_file.path), 0, chunk["chunk_bytes"])

        return Opened(chunk_file, chunk["chunk_size"], read, lambda: loader.close(0))

    def _loader(self, chunk: dict[str, Any]) -> Any:
        config = dict(self._config)
        if config.get("data_spec") is not None:
            config["data_spec"] = libraries.litdata_spec(config["data_spec"])
        loader = _library().PyTreeLoader()
        loader.setup(config, [chunk], libraries.litdata_serializers())
        return loader


class _Unpack:
    """From a chunk that is compressed whole to what its index describes."""

    def __init__(self, name: str, codec: str) -> None:
        self._name, self._codec = name, codec

    def __call__(self, stored: bytes) -> bytes:
        try:
            content: bytes = _codecs()[self._codec].decompress(stored)
        except Exception as e:  # each codec has errors of its own
            raise DatasetUnusable(f"{self._name} cannot be unpacked ({e!r}): it is cut, or was changed") from e
        return content


def _is_packed_whole(config: Mapping[str, Any]) -> bool:
    """Whether chunks are compressed as whole files. Other ones hold frames, which the library reads by itself."""
    return bool(config.get("compression")) and config.get("compression_level") in (None, "chunk")


def _codecs() -> Any:
    return libraries.litdata_codecs(library("litdata.streaming.compression", "litdata() reads with litdata", "litdata"))


def _library() -> Any:
    return library("litdata.streaming.item_loader", "litdata() reads with litdata", "litdata")
