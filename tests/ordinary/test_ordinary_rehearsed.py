"""What a run does not refuse in a loss, and only warns of, `everstep rehearse` finds before that costs anything."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.ordinary.ordinary_rows import ROWS, Row

pytestmark = pytest.mark.timeout(360)

# A run that ends of itself has to take more steps than a rehearsal needs.
LONGER = {"until=12": "until=30", "waited >= 9": "waited >= 12"}


@pytest.mark.long
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.script) for row in ROWS if row.unseen],
)
def test_row_that_a_loss_makes_wrong_unseen_is_found_by_a_rehearsal(row: Row, tmp_path: Path) -> None:
    text, ends = row.path.read_text(), "early_stop" in row.script
    for short, long in LONGER.items() if ends else ():
        text = text.replace(short, long)
    (tmp_path / row.path.name).write_text(text)
    options = ["--strict", "--steps", "20" if ends else "12", "--kill", "rank,all"]
    command = [sys.executable, "-m", "everstep.cli.main", "rehearse", *options]
    done = subprocess.run(
        [*command, "--json", "report.json", row.path.name],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "report.json").read_text())["findings"]
    assert any(re.search(row.differs, f"{one['names']} {one['text']}") for one in found), found
