"""Tar files in webdataset's convention, written and read by the library itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import webdataset as wds

from everstep.data import Blocks, DataError, DatasetUnusable, ElasticLoader, sample_rng
from everstep.data.fingerprints import fingerprint
from everstep_sources import Cache, CacheError, tar_counts, webdataset

COUNTS = [7, 9, 3, 8]


def write(folder: Path) -> list[str]:
    """Shards of these counts; sample 3 of each has another extension, and keys stand in folders."""
    urls = []
    for shard, count in enumerate(COUNTS):
        urls.append(str(folder / f"train-{shard}.tar"))
        with wds.TarWriter(urls[-1]) as sink:
            for i in range(count):
                text = {"txt": f"text {shard} {i}"} if i != 3 else {"alt.txt": "x"}
                sink.write({"__key__": f"d{i % 2}/{shard}-{i}", "json": {"id": [shard, i]}, **text})
    return urls


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    (tmp_path / "tars").mkdir()
    return write(tmp_path / "tars")


def by_library(urls: list[str]) -> list[dict[str, Any]]:
    found = wds.WebDataset(urls, shardshuffle=False, empty_check=False)
    return [{k: v for k, v in sample.items() if k not in ("__url__", "__local_path__")} for sample in found]


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in sample.items() if k != "__url__"}


def test_samples_are_those_that_the_library_gives(urls: list[str]) -> None:
    data = webdataset(urls, tar_counts(urls))
    assert data.lengths == tuple(COUNTS)
    wanted = by_library(urls)
    assert len(data) == len(wanted)
    for i in reversed(range(len(data))):
        assert plain(data[i]) == wanted[i]
    assert data[8]["__url__"] == "train-1.tar"


def test_order_is_one_at_any_world_size_with_workers_and_decoding(urls: list[str], tmp_path: Path) -> None:
    counts = tar_counts(urls)

    def make() -> Any:
        decoder = wds.autodecode.Decoder([])
        return webdataset(urls, counts, transform=lambda s: (decoder(s)["json"]["id"], int(sample_rng().integers(99))))

    orders = []
    for world in (1, 3):
        loaders = [
            ElasticLoader(make(), global_batch=8, rank=r, world_size=world, shuffle=Blocks(window=2), collate_fn=list,
                          num_workers=world - 1)
            for r in range(world)
        ]  # fmt: skip
        orders.append([s for step in zip(*loaders, strict=True) for b in step for s in b.data[: b.count]])
        for loader in loaders:
            loader.close()
    assert orders[0] == orders[1]
    assert sorted(tuple(s) for s, _ in orders[0]) == [(k, i) for k, n in enumerate(COUNTS) for i in range(n)]


def test_counts_come_from_a_file_and_names_with_braces(urls: list[str], tmp_path: Path) -> None:
    folder = Path(urls[0]).parent
    (tmp_path / "counts.json").write_text(json.dumps(tar_counts(urls)))
    items = [{"url": Path(u).name, "nsamples": n} for u, n in zip(urls, COUNTS, strict=True)]
    (tmp_path / "index.json").write_text(json.dumps({"wids_version": 1, "shardlist": items}))
    for name, counts in (("counts.json", tar_counts(urls)), ("index.json", dict(zip(urls, COUNTS, strict=True)))):
        found = webdataset(f"{folder}/train-{{0..3}}.tar", str(tmp_path / name))
        assert fingerprint(found) == fingerprint(webdataset(urls, counts))


def test_shards_far_away_come_through_the_cache_and_are_the_same_data(urls: list[str], tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    root = f"memory:/{tmp_path}"
    for url in urls:
        fs.pipe_file(f"{root}/{Path(url).name}", Path(url).read_bytes())
    far = [f"{root}/{Path(url).name}" for url in urls]
    largest = max(Path(url).stat().st_size for url in urls)
    cache = Cache(tmp_path / "cache", 2 * largest, patience=1)
    data = webdataset(far, tar_counts(far, cache=cache), cache=cache, open_limit=2)
    near = webdataset(urls, tar_counts(urls))
    assert webdataset(far, dict(zip(far, COUNTS, strict=True)), cache=cache).lengths == near.lengths
    assert fingerprint(data) == fingerprint(near)
    loader = ElasticLoader(data, global_batch=5, shuffle=Blocks(window=1), collate_fn=list)
    seen = [sample["__key__"] for batch in loader for sample in batch.data]
    assert sorted(seen) == sorted(near[i]["__key__"] for i in range(len(near)))
    data.close()
    with pytest.raises(CacheError, match=r"open_limit=16 shards take up to \d+ bytes.*smaller open_limit="):
        webdataset(far, tar_counts(urls), cache=cache)
    unknown = webdataset(far, dict(zip(far, COUNTS, strict=True)), cache=Cache(tmp_path / "c", 2 * largest, 0.1))
    with pytest.raises(CacheError, match="smaller open_limit="):
        [unknown[i] for i in range(len(unknown))]
    unknown.close()
    fs.rm(root, recursive=True)


def test_files_of_several_stores_and_folders_keep_names_apart(urls: list[str], tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    far = [f"memory:/{tmp_path}/{k}/x.tar" for k in (1, 2)]
    for url, source in zip(far, urls, strict=False):
        fs.pipe_file(url, Path(source).read_bytes())
    (tmp_path / "x.tar").write_bytes(Path(urls[2]).read_bytes())
    mixed = [*far, str(tmp_path / "x.tar")]
    cache = Cache(tmp_path / "cache", "1 MB")
    data = webdataset(mixed, tar_counts(mixed, cache=cache), cache=cache)
    assert [plain(data[i]) for i in range(len(data))] == by_library(urls[:3])
    data.close()
    with pytest.raises(DatasetUnusable, match="counts gives None"):
        webdataset(mixed, {"x.tar": 7}, cache=cache)
    two = webdataset(far, tar_counts(far, cache=cache), cache=cache)
    assert [shard.name for shard in two.shards] == ["1/x.tar", "2/x.tar"]
    fs.rm(f"memory:/{tmp_path}", recursive=True)


def cut(path: str) -> None:
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[: len(content) // 2])


def test_other_data_of_the_same_names_and_counts_is_told_apart_by_its_sizes(urls: list[str], tmp_path: Path) -> None:
    first = fingerprint(webdataset(urls, tar_counts(urls)))
    Path(urls[2]).write_bytes(Path(urls[2]).read_bytes() + bytes(10240))
    assert fingerprint(webdataset(urls, tar_counts(urls))) != first


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (webdataset, DatasetUnusable, r"does not say how many samples.*json.dump\(tar_counts\(urls\)"),
        (lambda u: webdataset(u, {"train-0.tar": 7}), DatasetUnusable, "train-1.tar: counts gives None for it"),
        (lambda u: webdataset([u[0], u[0]], {"train-0.tar": 7}), DatasetUnusable, "2 tar files, 1 of them different"),
        (
            lambda u: webdataset("s3://b/0.tar", {"0.tar": 1}),
            DataError,
            "s3://b/0.tar is not on this machine: pass cache=",
        ),
        (lambda u: webdataset("pipe:cat x", {}), DatasetUnusable, "only be read forward"),
        (lambda u: webdataset(u, u[0]), DatasetUnusable, "holds no counts"),
        (lambda u: webdataset(u, tar_counts(u) | {u[0]: 8})[0], DatasetUnusable, "declared with 8.*holds 7"),
        (
            lambda u: (cut(u[1]), webdataset(u, dict(zip(u, COUNTS, strict=True)))[9])[1],
            DatasetUnusable,
            "it is damaged|no tar file|holds",
        ),
        (lambda u: (tar_counts(u), cut(u[0]))[0] and webdataset(u, tar_counts(u))[6], DatasetUnusable, "tar|damaged"),
        (lambda u: (w := webdataset(u, tar_counts(u)), cut(u[0]), w[0])[2], DatasetUnusable, "and the index says"),
        (lambda u: webdataset(f"{u[0]}.no", {"train-0.tar.no": 1})[0], DatasetUnusable, "it is not there"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_fix(
    urls: list[str], call: Callable[[list[str]], Any], error: type, words: str
) -> None:
    with pytest.raises(error, match=words):
        call(urls)
