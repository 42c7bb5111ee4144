"""Each ordinary script ends as if nothing had happened, or is refused by name. `ordinary_rows.py` has the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ordinary_play import Played, difference, refusal, under_agents, under_torchrun
from ordinary_rows import EXACT, ROWS, Row

pytestmark = pytest.mark.timeout(360)


class NotHeld(AssertionError):
    """A script ended in another way than its row says. (An error of these tests' own is another one.)"""


def marked(row: Row, owner: str) -> object:
    if not owner:
        return pytest.param(row, id=row.script)
    why = pytest.mark.xfail(strict=True, raises=NotHeld, reason=f"{owner}: {row.today}")
    return pytest.param(row, id=row.script, marks=why)


def hold(row: Row, what: str, played: Played, reference: Played | None, *, disturbed: bool = False) -> bool:
    """Whether the script was refused, as it may be. Raises `NotHeld`."""
    said = refusal(played)
    if said is not None and row.refused:
        if not re.search(row.refused, said, re.DOTALL):
            raise NotHeld(f"{row.script}, {what}: refused without its name or the line to write: {said}")
        return True
    if said is not None:
        raise NotHeld(f"{row.script}, {what}: refused, and it can be right: {said}")
    if row.refused and not row.or_same and (disturbed or not row.late):
        raise NotHeld(f"{row.script}, {what}: not refused; exit codes {list(played.codes)}")
    if found := difference(played, reference, row.apart, EXACT and row.exact):
        raise NotHeld(f"{row.script}, {what}: {found}\n{played.log[-3000:]}")
    for name, lines in row.lines.items():
        if (text := played.files.get(name, "")).count("\n") != lines:
            raise NotHeld(f"{row.script}, {what}: {name} is to have {lines} lines: {text!r}")
    return False


@pytest.mark.parametrize("row", [marked(row, row.owner) for row in ROWS])
def test_script_under_everstep_run_ends_as_undisturbed_or_is_refused(row: Row, endpoint: str, tmp_path: Path) -> None:
    reference = None
    if row.torchrun:
        reference = under_torchrun(made(tmp_path, "torchrun"), row.path)
        if refusal(reference) is not None or any(reference.codes):
            reference = None  # the other test's
    undisturbed = under_agents(made(tmp_path, "undisturbed"), endpoint, row.path)
    if hold(row, "undisturbed", undisturbed, reference):
        return
    for kill in row.kills:
        disturbed = under_agents(made(tmp_path, kill.replace(":", "-")), endpoint, row.path, kill)
        assert disturbed.killed, f"{row.script} never came to {kill}"
        if hold(row, kill, disturbed, undisturbed, disturbed=True) and not row.late:
            raise NotHeld(f"{row.script} is refused when a peer was lost ({kill}), and not before")


@pytest.mark.parametrize("row", [marked(row, row.torchrun_owner) for row in ROWS if row.torchrun])
def test_script_under_torchrun_ends_as_undisturbed_or_is_refused(row: Row, tmp_path: Path) -> None:
    undisturbed = under_torchrun(made(tmp_path, "undisturbed"), row.path)
    if hold(row, "undisturbed", undisturbed, None):
        return
    disturbed = under_torchrun(made(tmp_path, "killed"), row.path, row.kills[0])
    assert disturbed.killed, f"{row.script} never came to {row.kills[0]}"
    if hold(row, row.kills[0], disturbed, undisturbed, disturbed=True) and not row.late:
        raise NotHeld(f"{row.script} is refused when a peer was lost ({row.kills[0]}), and not before")


def made(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name
