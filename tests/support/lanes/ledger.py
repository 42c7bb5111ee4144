"""The tests that were repeated, over the last runs: one that needs it again and again is no accident.

`.everstep/repeated.jsonl` has a line for each lane that was played: lane, commit, date and the tests that were
repeated. It holds the last `RUNS` of each lane.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RUNS = 10  # of each lane
MOST = 2  # of these in which a test may be repeated


def commit_of(folder: Path) -> str:
    """The present commit, with `-dirty` where files differ from it; "" where there is no git repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""


def enter(path: Path, lane: str, repeated: Sequence[str], commit: str) -> list[str]:
    """Add a run of `lane`; the tests of `repeated` that were repeated in more than `MOST` of its last `RUNS`."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    lines = _read(path)
    lines.append({"lane": lane, "commit": commit, "date": date, "repeated": sorted(repeated)})
    own = [line for line in lines if line["lane"] == lane][-RUNS:]
    others = [line for line in lines if line["lane"] != lane]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in (*others, *own)))
    return sorted(test for test in set(repeated) if sum(test in line["repeated"] for line in own) > MOST)


def _read(path: Path) -> list[dict[str, Any]]:
    """A line that cannot be read is left out, with a warning: it must not cost the run that is being entered."""
    lines = []
    for number, text in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        try:
            line = json.loads(text)
            lines.append({**line, "lane": str(line["lane"]), "repeated": list(line["repeated"])})
        except (ValueError, KeyError, TypeError):
            print(f"{path}:{number}: no object with lane and repeated; the line is left out", file=sys.stderr)
    return lines
