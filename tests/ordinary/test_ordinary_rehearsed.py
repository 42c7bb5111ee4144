"""What a run does not refuse in a loss, and only warns of, `everstep rehearse` finds before that costs anything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.ordinary.ordinary_rows import ROWS, Row
from support.rehearse import rehearse

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
    done = rehearse(tmp_path, *options, script=row.path.name, seconds=300)
    assert done.code == 1, done.shown[-3000:] + done.errors[-2000:]
    named = [f"{one['names']} {one['text']}" for one in done.findings]
    assert any(re.search(row.differs, one) for one in named), named
