"""What bytes to and from S3 cost this process: everstep.storage beside s3fs's own calls, in one run.

    python benchmarks/storage.py [--quick] [--json PATH] [--mib N] [--rounds N] [--data FOLDER]

The server is versitygw on the loopback, over plain HTTP, on the same cores; its objects lie in `--data` (a tmpfs where
there is one). Each measured act is a process of its own, whose clients have sent and fetched such an object before.
Acts are interleaved, figures are medians of the rounds. CPU seconds are the process's own: all threads, user, system.

Two shapes of the same bytes: `large`, one object of `--mib` MiB; `objects`, objects of 64 MiB, four at once.
Subjects: `s3fs` (`pipe_file` up, `cat_file` down), `s3fs_open` (a file opened for writing), `fsspec` (our backend;
large objects go up in parts of 16 MiB by four threads, and come down in such ranges, as the checkpoint engine does it).

Figures:
- `upload_cpu.SHAPE.SUBJECT`, `download_cpu…`: CPU seconds of s3fs ÷ ours. The goal of the upload is 3.
- `upload_rate…`, `download_rate…`: MiB a second; no goal, because server and client share the cores here.
- `upload_memory…`, `download_memory…`: peak resident memory beyond the bytes themselves ÷ the bytes.

Over plain HTTP s3fs (botocore) hashes each body for the signature; ours sends UNSIGNED-PAYLOAD in a presigned URL. Over
TLS botocore makes a CRC32 only, and both encrypt: the ratio there is smaller. No TLS endpoint is measured here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]

from checkpoint_parts.meter import measured
from figures import Better, Figure, finish, parser

MIB = 2**20
PART = 16 * MIB
OBJECT = 64 * MIB
THREADS = 4
BUCKET = "everstep-benchmark"
SUBJECTS = ("s3fs", "s3fs_open", "fsspec")
SHAPES = ("large", "objects")


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--mib", type=int, help="bytes of each act, in MiB: a multiple of 64; default 512, quick 128")
    p.add_argument("--rounds", type=int, help="default 5, quick 1")
    p.add_argument("--data", type=Path, default=Path("/dev/shm") if Path("/dev/shm").is_dir() else None)
    p.add_argument("--act", help="internal: what a child process measures, as JSON")
    args = p.parse_args()
    if args.act:
        print(json.dumps(act(**json.loads(args.act))))
        return 0
    size = (args.mib or (128 if args.quick else 512)) * MIB
    from testcluster.s3 import S3Server  # noqa: PLC0415 - builds the server on a new machine

    folder = Path(tempfile.mkdtemp(prefix="everstep-benchmark-", dir=args.data))
    server = S3Server(folder)
    server.start()
    try:
        server.bucket(BUCKET)
        samples = rounds(server, size, args.rounds or (1 if args.quick else 5))
    finally:
        server.stop()
        shutil.rmtree(folder)
    return finish(figures(samples, size), args)


def rounds(server: Any, size: int, count: int) -> dict[tuple[str, str, str], list[dict[str, float]]]:
    """Samples by way, shape and subject."""
    samples: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for number in range(count):
        for shape in SHAPES:
            for subject in SUBJECTS:
                what = {"subject": subject, "shape": shape, "size": size, "folder": uuid.uuid4().hex}
                command = [sys.executable, __file__, "--act", json.dumps(what)]
                done = subprocess.run(command, env={**os.environ, **server.env}, check=True, capture_output=True)
                for way, sample in json.loads(done.stdout).items():
                    samples.setdefault((way, shape, subject), []).append(sample)
                shutil.rmtree(server.data / BUCKET / what["folder"])
        print(f"round {number + 1} of {count}", file=sys.stderr)
    return samples


def figures(samples: dict[tuple[str, str, str], list[dict[str, float]]], size: int) -> list[Figure]:
    found = []
    for (way, shape, subject), acts in samples.items():
        cpu, wall, extra = (median(a[key] for a in acts) for key in ("cpu", "wall", "extra"))
        at, n = f"{shape}.{subject}", len(acts)
        found.append(Figure(f"{way}_seconds.{at}", cpu, "CPU s", Better.LOWER, n))
        found.append(Figure(f"{way}_rate.{at}", size / MIB / wall, "MiB/s", Better.HIGHER, n))
        found.append(Figure(f"{way}_memory.{at}", extra / size, "x", Better.LOWER, n))
        if subject == "fsspec":
            theirs = median(a["cpu"] for a in samples[way, shape, "s3fs"])
            goal = 3.0 if way == "upload" else None
            found.append(Figure(f"{way}_cpu.{at}", theirs / cpu, "x", Better.HIGHER, n, goal))
    return found


def act(subject: str, shape: str, size: int, folder: str) -> dict[str, dict[str, float]]:
    """Send and fetch `size` bytes; what each way cost."""
    data = memoryview(bytearray(os.urandom(MIB)) * (size // MIB))
    back = memoryview(bytearray(os.urandom(MIB)) * (size // MIB))  # touched, so that its pages are there already
    step = size if shape == "large" else OBJECT
    send, fetch = WAYS[subject](f"{BUCKET}/{folder}")
    like = OBJECT if shape == "objects" else 2 * OBJECT
    send("warm", data[:like])
    fetch("warm", back[:like])
    found = {}
    with ThreadPoolExecutor(THREADS if shape == "objects" else 1) as pool:
        for way, do, bytes_ in (("upload", send, data), ("download", fetch, back)):
            with measured() as sample:
                list(pool.map(lambda at, do=do, b=bytes_: do(f"{at}", b[at : at + step]), range(0, size, step)))
            found[way] = {"cpu": sample.cpu, "wall": sample.end - sample.start, "extra": sample.extra}
    assert back == data, f"{subject} gave other bytes back"
    return found


Send = Callable[[str, memoryview], None]


def _s3fs(root: str) -> tuple[Send, Send]:
    import s3fs  # noqa: PLC0415 - a subject's process loads that subject only

    fs = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)

    def fetch(name: str, view: memoryview) -> None:
        view[:] = fs.cat_file(f"{root}/{name}")

    return lambda name, view: fs.pipe_file(f"{root}/{name}", bytes(view)), fetch


def _s3fs_open(root: str) -> tuple[Send, Send]:
    import s3fs  # noqa: PLC0415

    fs = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)

    def send(name: str, view: memoryview) -> None:
        with fs.open(f"{root}/{name}", "wb", block_size=PART) as file:
            file.write(view)

    def fetch(name: str, view: memoryview) -> None:
        with fs.open(f"{root}/{name}", "rb", block_size=PART) as file:
            for start in range(0, len(view), PART):
                view[start : start + PART] = file.read(PART)

    return send, fetch


def _ours(root: str) -> tuple[Send, Send]:
    from everstep.storage import RetryingStore, open_store  # noqa: PLC0415

    store = RetryingStore(open_store(f"s3://{root}", part_size=PART))

    def send(name: str, view: memoryview) -> None:
        if len(view) <= OBJECT:
            store.put(name, view)
            return
        upload = store.start_upload(name, len(view))
        with ThreadPoolExecutor(THREADS) as pool:
            numbers = range(-(-len(view) // PART))
            list(pool.map(lambda n: upload.write_part(n, view[n * PART : (n + 1) * PART]), numbers))
        upload.commit()

    def fetch(name: str, view: memoryview) -> None:
        with ThreadPoolExecutor(THREADS if len(view) > OBJECT else 1) as pool:
            starts = range(0, len(view), PART)
            list(pool.map(lambda at: store.get_into(name, at, view[at : at + PART]), starts))

    return send, fetch


WAYS: dict[str, Callable[[str], tuple[Send, Send]]] = {
    "s3fs": _s3fs,
    "s3fs_open": _s3fs_open,
    "fsspec": _ours,
}


if __name__ == "__main__":
    sys.exit(main())
