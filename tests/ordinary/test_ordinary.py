"""Each ordinary script ends as if nothing had happened, or is refused by name. `ordinary_rows.py` has the table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from everstep.train.guards.script_check import UNREAD
from support.ordinary.ordinary_play import SIZE, Played, difference, refusal, under_agents, under_torchrun
from support.ordinary.ordinary_rows import ALL, ALL_AT_BEGIN, EXACT, ROWS, SCRIPTS, Row

pytestmark = pytest.mark.timeout(360)


class NotHeld(AssertionError):
    """A script ended in another way than its row says. (An error of these tests' own is another one.)"""


def cases() -> Iterator[object]:
    """Each row under both launchers, side by side: what is undisturbed is run once for both."""
    for row in ROWS:
        for launcher in ("everstep-run", "torchrun") if row.torchrun else ("everstep-run",):
            marks = [pytest.mark.long] if row.long else []
            yield pytest.param(row, launcher, id=f"{row.script}-{launcher}", marks=marks)


@cache
def as_undisturbed(row: Row, folder: Path) -> Played:
    """Under torchrun."""
    return under_torchrun(made(folder, row.script), row.path, patience=row.patience)


def hold(
    row: Row, what: str, played: Played, reference: Played | None, *, disturbed: bool = False, files: bool = True,
    launcher: str = "everstep-run",
) -> bool:  # fmt: skip
    """Whether the script was refused, as it is to be. Raises `NotHeld`. `files`: compare what the script wrote,
    and ask for survivors in their processes; torchrun has none."""
    said, refused = refusal(played), row.refused_under(launcher)
    if UNREAD in played.log:
        raise NotHeld(f"{row.script}, {what}: the reader of its text gave up\n{played.log[-3000:]}")
    hold_warning(row, what, played, disturbed=disturbed)
    if said is not None and refused:
        if not re.search(refused, said, re.DOTALL):
            raise NotHeld(f"{row.script}, {what}: refused without its name or the line to write: {said}")
        return True
    if said is not None:
        raise NotHeld(f"{row.script}, {what}: refused, and it can be right: {said}")
    if disturbed and launcher in row.unseen:
        if not re.search(rf"(these differ|are not those of).*{row.differs} \(", played.log):
            raise NotHeld(f"{row.script}, {what}: no warning names {row.differs}\n{played.log[-3000:]}")
        return True
    if refused and (disturbed or not row.late):
        raise NotHeld(f"{row.script}, {what}: not refused; exit codes {list(played.codes)}")
    if found := difference(played, reference, row.apart, 0.0 if EXACT and row.exact else row.near, files):
        raise NotHeld(f"{row.script}, {what}: {found}\n{played.log[-3000:]}")
    if disturbed and row.in_process and what != ALL and files and played.began != SIZE + 1:
        raise NotHeld(f"{row.script}, {what}: {played.began} processes took steps, where one of {SIZE} was replaced")
    for name, lines in row.lines.items() if files else ():
        if (text := played.files.get(name, "")).count("\n") != lines:
            raise NotHeld(f"{row.script}, {what}: {name} is to have {lines} lines: {text!r}")
    return False


def hold_warning(row: Row, what: str, played: Played, *, disturbed: bool) -> None:
    """The start lists what the loop carries, once, and only where that is something."""
    found = re.findall(r"carried by the loop and not tracked: (.*?)\. In a new process", played.log)
    if bool(row.carried) != bool(found) and not (row.refused and not row.late):
        raise NotHeld(f"{row.script}, {what}: warned of {found}")
    if not all(re.search(row.carried, names) for names in found) or len(found) > 1 + 2 * disturbed:
        raise NotHeld(f"{row.script}, {what}: warned of {found}")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the undisturbed runs under torchrun."""
    return tmp_path_factory.mktemp("undisturbed")


def test_each_script_has_one_row() -> None:
    assert sorted(row.script for row in ROWS) == sorted(path.stem for path in SCRIPTS.glob("*.py"))


@pytest.mark.long_but(
    "nothing_tracked-torchrun",
    "unweighted_micro_batches-torchrun",
    "iterable_dataset-torchrun",
    "split_unseeded-torchrun",
    "group_by_hand-everstep-run",
    "powersgd-everstep-run",
    "buffer_of_first_batch-everstep-run",
    "losses_tracked-everstep-run",
    "plateau-torchrun",
    "batch_norm-torchrun",
    "gan-torchrun",
    "closure_by_eval-everstep-run",
)
@pytest.mark.parametrize(("row", "launcher"), list(cases()))
def test_script_with_a_rank_killed_ends_as_undisturbed_or_is_refused(
    row: Row, launcher: str, etcd_endpoint: str, tmp_path: Path, undisturbed: Path
) -> None:
    plain = as_undisturbed(row, undisturbed) if row.torchrun else None
    if launcher == "torchrun":
        assert plain is not None
        if not hold(row, "undisturbed", plain, None, launcher=launcher) and row.kills:
            killed = under_torchrun(made(tmp_path, "killed"), row.path, row.kills[0])
            hold_killed(
                row, row.kills[0], killed, plain, files=False, launcher=launcher
            )  # steps behind the commit come again
        return
    if plain is not None and any(plain.codes):
        plain = None  # refused there too
    first = under_agents(made(tmp_path, "undisturbed"), etcd_endpoint, row.path, patience=row.patience)
    if hold(row, "undisturbed", first, plain):
        return
    for kill in row.kills:
        hold_killed(
            row, kill, under_agents(made(tmp_path, kill.replace(":", "-")), etcd_endpoint, row.path, kill), first
        )


@pytest.mark.long
@pytest.mark.parametrize("row", [pytest.param(row, id=row.script) for row in ROWS if row.kills and not row.refused])
def test_script_with_all_ranks_killed_ends_as_undisturbed(row: Row, etcd_endpoint: str, tmp_path: Path) -> None:
    """All go on from the commit, and nothing that they compute then is taken for another computation."""
    first = under_agents(made(tmp_path, "undisturbed"), etcd_endpoint, row.path)
    kill = ALL
    killed = under_agents(made(tmp_path, "killed"), etcd_endpoint, row.path, kill)
    if not killed.killed:  # a script may never come to a backward pass of its fifth step on all ranks
        kill = ALL_AT_BEGIN
        killed = under_agents(made(tmp_path, "killed-at-begin"), etcd_endpoint, row.path, kill)
    assert killed.killed, f"{row.script} never came to {kill}\n{killed.log[-3000:]}"
    assert not hold(row, kill, killed, first, disturbed=True, files=False)


def hold_killed(
    row: Row, kill: str, played: Played, reference: Played, *, files: bool = True, launcher: str = "everstep-run"
) -> None:
    assert played.killed, f"{row.script} never came to {kill}\n{played.log[-3000:]}"
    if hold(row, kill, played, reference, disturbed=True, files=files, launcher=launcher) and not row.late:
        raise NotHeld(f"{row.script} is refused when a peer was lost ({kill}), and not before")


def made(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name
