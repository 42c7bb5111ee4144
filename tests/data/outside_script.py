"""Runs in an environment that has MosaicML Streaming and litdata, which do not fit beside what the other tests need:
writes with the library, and compares what everstep_sources reads with what was written."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch

from everstep.data import Blocks, DataError, ElasticLoader
from everstep.data.fingerprints import fingerprint
from everstep_sources import Cache, litdata, mds

N = 100


def make_torchvision_importable() -> Any:
    """Some builds of it are for CUDA, and find no operators beside a torch for the CPU; others have their own, and end
    the process if there are such by then. Both libraries import it; nothing here uses it."""
    if subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False).returncode == 0:
        return None
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None
    text = (Path(spec.origin or "").parent / "_meta_registrations.py").read_text()
    names = {a or b for a, b in re.findall(r'register_meta\("(\w+)"|register_fake\("torchvision::(\w+)"', text)}
    library = torch.library.Library("torchvision", "DEF")
    for name in names:
        library.define(f"{name}(Tensor a) -> Tensor")
    return library


def item(i: int) -> dict[str, Any]:
    return {"i": i, "x": torch.arange(i % 7 + 1), "s": "a" * i}


def refused(call: Any, words: str) -> None:
    try:
        call()
    except DataError as e:
        assert re.search(words, str(e)), e  # noqa: PT017  pytest is not installed there
    else:
        raise AssertionError(f"not refused: {words}")


def one_order(make: Any) -> None:
    orders = []
    for world in (1, 3):
        loaders = [
            ElasticLoader(make(), global_batch=9, rank=r, world_size=world, shuffle=Blocks(window=2), collate_fn=list,
                          num_workers=r)
            for r in range(world)
        ]  # fmt: skip
        orders.append([int(s["i"]) for step in zip(*loaders, strict=True) for b in step for s in b.data[: b.count]])
        for loader in loaders:
            loader.close()
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == list(range(N))


def check_mds(folder: Path) -> None:
    from streaming import MDSWriter, StreamingDataset  # noqa: PLC0415

    for compression in (None, "zstd"):
        out = folder / f"mds-{compression}"
        columns = {"i": "int", "x": "ndarray"}
        with MDSWriter(out=str(out), columns=columns, size_limit=1000, compression=compression, hashes=["sha1"]) as to:
            for i in range(N):
                to.write({"i": i, "x": np.arange(i % 7 + 1)})
        cache = Cache(folder / "cache", "1 MB")
        data = mds(str(out), cache=cache)
        theirs = StreamingDataset(local=str(folder / f"l-{compression}"), remote=str(out), shuffle=False, batch_size=1)
        assert len(data) == len(theirs) == N
        assert len(data.shards) > 5
        for i in range(N):
            assert data[i]["i"] == theirs[i]["i"] == i
            assert (data[i]["x"] == theirs[i]["x"]).all()
        one_order(lambda out=out: mds(str(out), cache=Cache(folder / "cache", "6 kB"), open_limit=2))
        fs, far = fsspec.filesystem("memory"), f"memory://{compression}"
        for path in out.iterdir():
            fs.pipe_file(f"{far}/{path.name}", path.read_bytes())
        assert fingerprint(mds(far, cache=cache)) == fingerprint(data)
        assert mds(far, cache=cache)[99]["i"] == 99
        name = data.shards[0].name + (".zstd" if compression else "")
        content = bytearray((out / name).read_bytes())
        content[-1] ^= 1
        fs.pipe_file(f"{far}/{name}", bytes(content))
        refused(
            lambda far=far, fresh=folder / f"fresh-{compression}": mds(far, cache=Cache(fresh, "1 MB"))[0], "sha1 is"
        )
        refused(lambda far=far: mds(far), "not on this machine: pass cache=")
    refused(lambda: mds(str(folder / "mds-zstd")), "is compressed .*pass cache=")
    near = mds(str(folder / "mds-None"))
    assert [near[i]["i"] for i in range(N)] == list(range(N))
    assert fingerprint(near) != fingerprint(mds(str(folder / "mds-zstd"), cache=Cache(folder / "cache", "1 MB")))
    with MDSWriter(out=str(folder / "pickled"), columns={"i": "pkl"}) as to:
        to.write({"i": 1})
    refused(lambda: mds(str(folder / "pickled")), "unsafe type: pkl")
    assert mds(str(folder / "pickled"), allow_unsafe_types=True)[0] == {"i": 1}


def check_litdata(folder: Path) -> None:
    import litdata as library  # noqa: PLC0415

    out = str(folder / "lit")
    library.optimize(fn=item, inputs=list(range(N)), output_dir=out, chunk_size=15, num_workers=1)
    for data in (litdata(out), litdata(out, cache=Cache(folder / "cache", "1 MB"))):
        assert len(data.shards) == 7
        for i in reversed(range(N)):
            found, wanted = data[i], item(i)
            assert (found["i"], found["s"]) == (wanted["i"], wanted["s"])
            assert torch.equal(found["x"], wanted["x"])
    one_order(lambda: litdata(out, open_limit=2))
    check_compressed(folder, library)
    index = json.loads((folder / "lit" / "index.json").read_text())
    for change, words in (
        ({"item_loader": "TokensLoader"}, "TokensLoader.*stream of tokens"),
        ({"encryption": {"algorithm": "x"}}, "encrypted"),
        ({"compression": "lz99"}, "compressed with lz99.*pip install zstd"),
        ({"compression": "zstd"}, "compressed whole .zstd.: pass cache="),
        ({"data_format": ["int", "pickle"]}, "allow_unsafe_types=True"),
    ):
        (folder / "other").mkdir(exist_ok=True)
        changed = {**index, "config": {**index["config"], **change}}
        (folder / "other" / "index.json").write_text(json.dumps(changed))
        refused(lambda: litdata(str(folder / "other")), words)


def check_compressed(folder: Path, library: Any) -> None:
    for level in ("batch", "sample", "chunk"):
        out = folder / f"lit-{level}"
        kind = {"compression": "zstd:5", "compression_level": level}
        library.optimize(fn=item, inputs=list(range(N)), output_dir=str(out), chunk_size=15, num_workers=1, **kind)
        cache = Cache(folder / "cache", "1 MB")
        if level == "chunk":
            refused(lambda out=out: litdata(str(out)), "compressed whole .*pass cache=")
        for made in (None, cache) if level != "chunk" else (cache,):
            data = litdata(str(out), cache=made)
            for i in reversed(range(N)):
                found = data[i]
                assert (found["i"], found["s"]) == (i, "a" * i)
                assert torch.equal(found["x"], item(i)["x"])
            one_order(lambda out=out, made=made: litdata(str(out), cache=made, open_limit=2))
    path = next(out.glob("chunk-0-0*.bin"))
    path.write_bytes(path.read_bytes()[:-9])
    refused(lambda: litdata(str(out), cache=Cache(folder / "fresh", "1 MB"))[0], "cannot be unpacked")


if __name__ == "__main__":
    kept = make_torchvision_importable()
    {"mds": check_mds, "litdata": check_litdata}[sys.argv[1]](Path(sys.argv[2]))
    print("all is right")
