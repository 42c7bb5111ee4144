"""webdataset's tar files, with the samples of each counted beforehand.

A tar file has no index. So it is listed when it is opened: where each member lies, and which belong to one sample, by
webdataset's own rules. A sample's bytes are read when it is asked for. Invariant: a sample is what
`webdataset.WebDataset` gives for the same file before any decoding, but for `__url__`, which names the shard.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from everstep.data.errors import DatasetUnusable
from everstep.data.shards import Shard, ShardedDataset
from everstep_sources.cache import Cache
from everstep_sources.files import Files, Opened, Opener, library, sharded

Counts = Mapping[str, Any] | str | os.PathLike[str]
# Names that webdataset leaves out of samples by default.
_META = re.compile(r"__[^/]*__($|/)")


def webdataset(
    urls: str | Sequence[str],
    counts: Counts | None = None,
    *,
    cache: Cache | None = None,
    transform: Callable[[dict[str, Any]], Any] | None = None,
    open_limit: int = 16,
) -> ShardedDataset:
    """The samples of tar files in webdataset's convention: each a mapping of `__key__`, `__url__` and the bytes of each
    of its files by extension, through `transform` (a `webdataset.autodecode.Decoder`, say).

    `urls`: paths or URLs, one with braces ("data-{000..127}.tar") or several. `counts`: how many samples each holds, by
    URL or by the file's name, as a number or as `tar_counts` gives it, with the bytes that tell the data from other of
    the same names; or the path or URL of a JSON file of that, or of an index with `shardlist`. `cache`: needed for
    URLs. Raises DatasetUnusable, CacheError, DataError.
    """
    listed = _expanded(urls)
    root = _common_folder(listed)
    files = Files(root.rstrip("/") or ("/" if root else ""), cache)
    for url in listed:
        Files(url, cache).check()
    if counts is None:
        raise DatasetUnusable(
            f"{listed[0]}: a tar file does not say how many samples it holds, so no position in it can be found again."
            " Count them once: `json.dump(tar_counts(urls), open('counts.json', 'w'))`, and pass counts='counts.json'"
        )
    known = _Counts(counts, listed)
    counted = {url.removeprefix(root): known.of(url) for url in listed}
    sizes = {name: size for name, (_, size) in counted.items() if size is not None}
    return sharded(
        [Shard(name, samples) for name, (samples, _) in counted.items() if samples],
        _OpenTar(files, sizes),
        transform=transform,
        open_limit=open_limit,
        identity=json.dumps(sizes) if sizes else "",
        sizes=sizes,
    )


def tar_counts(urls: str | Sequence[str], *, cache: Cache | None = None) -> dict[str, dict[str, int]]:
    """The samples and bytes of each of these tar files, by URL. Reads the headers of local files, and all of others."""
    counted = {}
    for url in _expanded(urls):
        files = Files("", cache)
        Files(url, cache).check()
        file = files.hold(url, size=None)
        try:
            counted[url] = {"samples": len(_listed(file.path, url)), "bytes": file.path.stat().st_size}
        finally:
            file.close()
    return counted


class _OpenTar(Opener):
    def __init__(self, files: Files, sizes: Mapping[str, int]) -> None:
        super().__init__(files)
        self._sizes = dict(sizes)

    def __call__(self, name: str) -> Sequence[Any]:
        archive = self.files.hold(name, size=self._sizes.get(name), stored=self._sizes.get(name))
        try:
            samples = _listed(archive.path, name)
            file = archive.path.open("rb")
        except BaseException:
            archive.close()
            raise

        def read(index: int) -> Any:
            members = []
            for member in samples[index]:
                file.seek(member.offset_data)
                data = file.read(member.size)
                if len(data) != member.size:
                    raise DatasetUnusable(f"{archive.path} ends within {member.name}: it is damaged")
                members.append({"fname": member.name, "data": data, "__url__": name})
            return next(iter(_library().group_by_keys(members)))

        return Opened(archive, len(samples), read, file.close)


def _listed(path: Path, name: str) -> list[list[tarfile.TarInfo]]:
    """The members of each sample, as `webdataset` groups them. Raises DatasetUnusable."""
    members = []
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if member.isreg() and not _META.match(member.name):
                    if member.sparse is not None:
                        raise DatasetUnusable(f"{name}: {member.name} is a sparse file: write it without holes")
                    members.append(member)
    except tarfile.ReadError as e:
        raise DatasetUnusable(f"{name} is no tar file that can be read at random ({e}): unpack .tar.gz to .tar") from e
    # The library decides which members are one sample: it is given the member in place of its bytes.
    listing = ({"fname": m.name, "data": m, "__url__": name} for m in members)
    return [
        [value for key, value in sample.items() if not key.startswith("__")]
        for sample in _library().group_by_keys(listing)
    ]


def _common_folder(urls: Sequence[str]) -> str:
    """The common prefix of all URLs, up to a "/", so that names do not depend on the data's place; "" if none."""
    first, last = min(urls), max(urls)
    same = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(min(first, last, key=len))
    )
    folder = first[: first.rfind("/", 0, same) + 1]
    return "" if folder.endswith("://") else folder


def _expanded(urls: str | Sequence[str]) -> list[str]:
    listed = [u for url in ([urls] if isinstance(urls, str) else urls) for u in _expand(str(url))]
    if not listed or len(set(listed)) < len(listed):
        raise DatasetUnusable(
            f"{urls!r}: {len(listed)} tar files, {len(set(listed))} of them different: pass each once"
        )
    if piped := [url for url in listed if url.startswith("pipe:")]:
        raise DatasetUnusable(f"{piped[0]!r}: what a command prints can only be read forward: pass a file or a URL")
    return listed


def _expand(url: str) -> list[str]:
    _library()
    from webdataset.shardlists import expand_urls  # noqa: PLC0415  the library is optional

    return list(expand_urls(url))


class _Counts:
    """The sample counts of tar files, from the user or a file, by URL, or by the file's name if that is unique."""

    def __init__(self, counts: Counts, listed: Sequence[str]) -> None:
        self._known = counts if isinstance(counts, Mapping) else _from_file(str(counts))
        self._by_name = {PurePosixPath(url).name: count for url, count in self._known.items()}
        if len(self._by_name) < len(self._known) or len({PurePosixPath(url).name for url in listed}) < len(listed):
            self._by_name = {}

    def of(self, url: str) -> tuple[int, int | None]:
        """Samples and bytes."""
        count = self._known.get(url, self._by_name.get(PurePosixPath(url).name))
        samples, size = (count.get("samples"), count.get("bytes", -1)) if isinstance(count, Mapping) else (count, -1)
        if not isinstance(samples, int) or not isinstance(size, int) or isinstance(samples, bool) or samples < 0:
            raise DatasetUnusable(f"{url}: counts gives {count!r} for it: count its samples with tar_counts(urls)")
        return samples, size if size >= 0 else None


def _from_file(path: str) -> Mapping[str, Any]:
    folder, _, name = path.rpartition("/")
    try:
        read = json.loads(Files(folder or ".", None).read(name))
        if "shardlist" in read:
            return {item["url"]: item["nsamples"] for item in read["shardlist"]}
    except (ValueError, KeyError, TypeError) as e:
        raise DatasetUnusable(f"{path} holds no counts ({e!r}): write tar_counts(urls) into it as JSON") from e
    if not isinstance(read, dict):
        raise DatasetUnusable(f"{path} holds a {type(read).__name__}: a mapping of URLs to counts is expected")
    return read


def _library() -> Any:
    return library("webdataset.tariterators", "webdataset() groups samples with webdataset", "webdataset")
