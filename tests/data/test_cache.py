"""The cache of files that are far away: shared, limited, and never giving out what is not whole."""

import ctypes
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from everstep.data import DataError
from everstep_sources import Cache, CacheError, CacheFull

CONTEXT = multiprocessing.get_context("fork")


@pytest.fixture
def far(tmp_path: Path) -> Iterator[str]:
    """A store that is not on this disk: the URL of a folder with files 0 to 9 of 1000 bytes each."""
    root = f"memory:/{tmp_path}"
    fs = fsspec.filesystem("memory")
    for i in range(10):
        fs.pipe_file(f"{root}/{i}.bin", content(i))
    yield root
    fs.rm(root, recursive=True)


def content(i: int) -> bytes:
    return random.Random(i).randbytes(1000)


def entries(folder: Path) -> list[str]:
    return sorted(json.loads((e / ".whole").read_text())["file"] for e in folder.iterdir() if (e / ".whole").exists())


def test_file_is_fetched_once_and_least_recently_used_goes_first(far: str, tmp_path: Path) -> None:
    cache = Cache(tmp_path, 3000)
    for i in (0, 1, 2, 0, 3):
        held = cache.hold(f"{far}/{i}.bin")
        assert held.path.read_bytes() == content(i)
        held.close()
        time.sleep(0.002)
    assert entries(tmp_path) == ["0.bin", "2.bin", "3.bin"]
    fsspec.filesystem("memory").rm(f"{far}/2.bin")
    cache.hold(f"{far}/2.bin").close()  # not asked of the store again


def test_what_is_open_stays_and_who_finds_no_room_is_told(far: str, tmp_path: Path) -> None:
    cache = Cache(tmp_path, "3 kB", patience=0.2)
    held = [cache.hold(f"{far}/{i}.bin") for i in range(3)]
    with pytest.raises(
        CacheFull, match=r"needs 1000 bytes, and 3000 of the cache's limit of 3000 are open.*limit= of 4000"
    ):
        cache.hold(f"{far}/3.bin")
    assert [h.path.read_bytes() for h in held] == [content(i) for i in range(3)]
    held[1].close()
    held[1].close()
    cache.hold(f"{far}/3.bin").close()
    assert entries(tmp_path) == ["0.bin", "2.bin", "3.bin"]
    for one in held:
        one.close()


def test_lock_of_a_killed_process_ends_with_it(far: str, tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1000, patience=20)
    ready, said = CONTEXT.Pipe(duplex=False)

    def hold() -> None:
        held = cache.hold(f"{far}/0.bin")
        said.send(str(held.path))
        time.sleep(60)

    process = CONTEXT.Process(target=hold, daemon=True)
    process.start()
    path = Path(ready.recv())
    with pytest.raises(CacheFull):
        Cache(tmp_path, 1000, patience=0.1).hold(f"{far}/1.bin")
    assert path.read_bytes() == content(0)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    cache.hold(f"{far}/1.bin").close()
    assert entries(tmp_path) == ["1.bin"]


@pytest.mark.parametrize("damage", ["flip", "cut", "mark", "no file"])
def test_damaged_file_is_fetched_again(far: str, tmp_path: Path, damage: str) -> None:
    cache = Cache(tmp_path, 5000)
    held = cache.hold(f"{far}/0.bin")
    held.close()
    match damage:
        case "flip":
            held.path.write_bytes(b"?" + content(0)[1:])
        case "cut":
            held.path.write_bytes(content(0)[:500])
        case "mark":
            (held.path.parent / ".whole").write_bytes(b'{"fi')
        case _:
            held.path.unlink()
    again = cache.hold(f"{far}/0.bin")
    assert again.path.read_bytes() == content(0)
    again.close()
    assert entries(tmp_path) == ["0.bin"]


def test_another_version_of_a_url_is_another_file(far: str, tmp_path: Path) -> None:
    cache = Cache(tmp_path, 5000)
    cache.hold(f"{far}/0.bin", version="a").close()
    fsspec.filesystem("memory").pipe_file(f"{far}/0.bin", b"x" * 10)
    held = cache.hold(f"{far}/0.bin", version="b")
    assert held.path.read_bytes() == b"x" * 10
    held.close()


def test_unpacked_content_is_what_is_kept_and_counted(far: str, tmp_path: Path) -> None:
    cache = Cache(tmp_path, 5000)
    held = cache.hold(f"{far}/0.bin", stored=1000, size=2000, unpack=lambda b: b + b, name="raw")
    assert (held.path.name, held.path.read_bytes()) == ("raw", content(0) * 2)
    held.close()


def play(folder: Path, far: str, seed: int, over: Any, count: Any) -> None:
    """Open, read and close files at random; what is read is always whole."""
    rng = random.Random(seed)
    cache = Cache(folder, 4500, patience=30)
    held: list[tuple[int, Any]] = []
    while not over.value:
        if len(held) == 1:
            i, one = held.pop(0)
            assert one.path.read_bytes() == content(i), "what was held has changed"
            one.close()
        i = rng.randrange(10)
        held.append((i, cache.hold(f"{far}/{i}.bin")))
        assert held[-1][1].path.read_bytes() == content(i)
        count.value += 1
    os._exit(0)


def test_processes_killed_at_random_moments_leave_only_whole_files_within_the_limit(far: str, tmp_path: Path) -> None:
    rng = random.Random(5)
    over, count = CONTEXT.RawValue("b", 0), CONTEXT.RawValue("i", 0)
    players = [CONTEXT.Process(target=play, args=(tmp_path, far, n, over, count), daemon=True) for n in range(3)]
    for p in players:
        p.start()
    for kill in range(20):
        before, until = count.value, time.monotonic() + 30
        while count.value == before:
            assert time.monotonic() < until, "no file was had for 30 s"
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.05))
        assert sum(len(e.name) == 32 for e in os.scandir(tmp_path)) * 1000 <= 4500
        victim = rng.randrange(3)
        os.kill(players[victim].pid or 0, signal.SIGKILL)
        players[victim].join()
        assert players[victim].exitcode == -signal.SIGKILL, "it failed before it was killed"
        players[victim] = CONTEXT.Process(target=play, args=(tmp_path, far, 10 + kill, over, count), daemon=True)
        players[victim].start()
    over.value = 1
    for p in players:
        p.join(40)
        assert p.exitcode == 0
    cache = Cache(tmp_path, 4500)
    for i in range(10):
        held = cache.hold(f"{far}/{i}.bin")
        assert held.path.read_bytes() == content(i)
        held.close()
    left = [e.name for e in tmp_path.iterdir() if e.name.startswith("part-")]
    assert left == [], "what killed processes left was not removed"


def fill_a_small_disk(far: str, folder: Path) -> None:
    """On a file system of 64 kB that only this process sees."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private, recursive = 0x20000, 1 << 18, 1 << 14
    assert libc.unshare(new_mounts) == 0
    assert libc.mount(None, b"/", None, private | recursive, None) == 0
    assert libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=64k") == 0
    big = f"{far}/big.bin"
    fsspec.filesystem("memory").pipe_file(big, bytes(100_000))
    cache = Cache(folder, "1 MB")
    with pytest.raises(CacheFull, match=r"the disk of .* is full .*smaller limit="):
        cache.hold(big)
    assert not list(folder.glob("part-*"))
    cache.hold(f"{far}/0.bin").close()
    os._exit(0)


def test_full_disk_is_told_and_leaves_nothing_half_written(far: str, tmp_path: Path) -> None:
    process = CONTEXT.Process(target=fill_a_small_disk, args=(far, tmp_path))
    process.start()
    process.join(30)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda f, t: Cache(t, "lots"), DataError, "limit='lots': bytes are expected, as a number or like '20 GiB'"),
        (lambda f, t: Cache(t, 0), DataError, "limit=0: bytes"),
        (lambda f, t: Cache(t, 1, patience=0), DataError, "patience=0"),
        (lambda f, t: Cache(t, 999).hold(f"{f}/0.bin"), CacheFull, "has 1000 bytes, and the cache's limit is 999"),
        (lambda f, t: Cache(t, 5000).hold(f"{f}/no.bin"), CacheError, r"no.bin cannot be fetched: FileNotFound"),
        (lambda f, t: Cache(t, 5000).hold(f"{f}/0.bin", stored=5), CacheError, "has 1000 bytes, and 5 are expected"),
        (lambda f, t: Cache(t / "file" / "x", 5000).hold(f"{f}/0.bin"), CacheError, "the folder cannot be made"),
    ],
)
def test_what_cannot_be_kept_is_refused(far: str, tmp_path: Path, call: Any, error: type, words: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(error, match=words):
        call(far, tmp_path)
    assert not list(tmp_path.glob("part-*"))
