"""What `make nightly` found on a commit: results.json, a line for each test."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from release.errors import ReleaseError

FILE = "results.json"
GOOD = ("passed", "passed alone", "skipped")
REMEDY = "run `make nightly`, or release without with WITHOUT_RESULTS=1, which the release notes then say"


def counts(path: Path, commit: str, lanes: Collection[str]) -> Counter[str]:
    """How many tests had which outcome, on this `commit` in full.

    Raises `ReleaseError` if the file is missing or damaged, is of another commit or of a run that ended early, or has a
    test that failed.
    """
    entries = _read(path)
    others = sorted({str(one["commit"]) for one in entries if not _is(str(one["commit"]), commit)})
    if others:
        raise ReleaseError(f"{path.name} is of the commit {others[0]}, and {commit[:12]} is to be released: {REMEDY}")
    missing = sorted(set(lanes) - {str(one["lane"]) for one in entries})
    if missing:
        raise ReleaseError(f"{path.name} has no test of the lanes {', '.join(missing)}: `make nightly` goes on there")
    bad = [one for one in entries if one["outcome"] not in GOOD]
    if bad:
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise ReleaseError(f"{path.name}: {bad[0]['test']} {bad[0]['outcome']}{more}. {REMEDY}")
    return Counter(str(one["outcome"]) for one in entries)


def _is(short: str, commit: str) -> bool:
    return len(short) >= 7 and commit.startswith(short)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        entries = json.loads(path.read_text())
    except FileNotFoundError:
        raise ReleaseError(f"{path.name} is missing: {REMEDY}") from None
    except (OSError, ValueError) as e:
        raise ReleaseError(f"{path.name} cannot be read: {e}") from e
    keys = {"test", "lane", "outcome", "commit"}
    if (
        not isinstance(entries, list)
        or not entries
        or not all(isinstance(e, dict) and keys <= e.keys() for e in entries)
    ):
        raise ReleaseError(f"{path.name} is no list of tests with {', '.join(sorted(keys))}: {REMEDY}")
    return entries
