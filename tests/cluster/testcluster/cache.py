"""Results kept outside the checkout and found again by the content that made them.

A step is a name, the parts that determine its result, and a function that makes it. Its result lives in
`<cache>/<name>/<key>`, and exists only when it is whole: it is made beside and renamed. So a step that was interrupted
runs again, a step whose inputs did not change is skipped, and two processes never make the same thing at once.
"""

import fcntl
import hashlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

KEPT_VERSIONS = 3  # of each step's results; older ones are deleted, so that the cache has a bound
KEY_LENGTH = 12

HERE = Path(__file__).resolve().parent.parent  # tests/cluster
CHECKOUT = HERE.parent.parent

Part = str | Path
_print_lock = threading.Lock()
_skipped: set[tuple[str, str]] = set()


def root() -> Path:
    """The cache folder: `$EVERSTEP_CACHE`, or `~/.cache/everstep`."""
    folder = Path(os.environ.get("EVERSTEP_CACHE") or Path.home() / ".cache" / "everstep")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def logs() -> Path:
    folder = root() / "logs"
    folder.mkdir(exist_ok=True)
    return folder


def say(seconds: float, what: str, how: str) -> None:
    """One line a step, to standard error: standard output belongs to the commands' results."""
    with _print_lock:
        print(f"{seconds:7.1f} s  {what}: {how}", file=sys.stderr, flush=True)


def say_skipped(what: str, have: str) -> None:
    """Once a process and step: a step that many others stand on is looked up dozens of times."""
    if (what, have) not in _skipped:
        _skipped.add((what, have))
        say(0, what, f"skipped, have {have}")


def _tree(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def key_of(*parts: Part) -> str:
    """A short hash of strings and of the names, modes and contents of files and folders."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            total.update(f"text {len(part)}\n{part}".encode())
            continue
        files = list(_tree(part)) if part.is_dir() else [part]
        for file in files:
            name = file.relative_to(part) if part.is_dir() else Path(file.name)
            data = file.read_bytes()
            total.update(f"file {name} {file.stat().st_mode & 0o111:o} {len(data)}\n".encode())
            total.update(data)
    return total.hexdigest()[:KEY_LENGTH]


@contextmanager
def lock(name: str) -> Iterator[None]:
    """Exclusive across processes: several test runs may want the same step at once."""
    folder = root() / "locks"
    folder.mkdir(exist_ok=True)
    with (folder / name.replace("/", "-")).open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(0, name, "waiting for another process that is at it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def artifact(name: str, parts: tuple[Part, ...], make: Callable[[Path], None]) -> Path:
    """The folder that `make` fills, made only if no result with the same `parts` exists."""
    key = key_of(name, *parts)
    final = root() / name / key
    if final.is_dir():
        say_skipped(name, key)
        return final
    with lock(name):
        if final.is_dir():
            return final
        began = time.monotonic()
        work = final.with_name(f".{key}.part")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        make(work)
        work.rename(final)
        _prune(final.parent, final)
        say(time.monotonic() - began, name, f"built {key}")
    return final


def _prune(folder: Path, newest: Path) -> None:
    """Two that were made within a tick of the clock have one time, but for the one that was just made."""
    made = (p for p in folder.iterdir() if not p.name.startswith("."))
    versions = sorted(made, key=lambda p: (p == newest, p.stat().st_mtime))
    for old in versions[:-KEPT_VERSIONS]:
        shutil.rmtree(old, ignore_errors=True)
