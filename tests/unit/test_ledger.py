"""A test that was repeated in three of its lane's last ten runs is named; runs of other lanes do not count."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from support.lanes.ledger import RUNS, commit_of, enter


def test_third_of_ten_runs_names_the_test(tmp_path: Path) -> None:
    ledger = tmp_path / "state" / "repeated.jsonl"
    runs = [["a", "b"], [], ["a"], ["b"], ["a"]]
    assert [enter(ledger, "unit", run, "c") for run in runs] == [[], [], [], [], ["a"]]
    assert enter(ledger, "unit", [], "c") == [], "a run in which it was not repeated fails for nothing"
    first = json.loads(ledger.read_text().splitlines()[0])
    assert (first["lane"], first["commit"], first["repeated"]) == ("unit", "c", ["a", "b"])
    assert first["date"].startswith("20")


def test_ten_later_runs_forget_and_those_of_another_lane_do_not(tmp_path: Path) -> None:
    ledger = tmp_path / "repeated.jsonl"
    for _ in range(2):
        enter(ledger, "unit", ["a"], "c")
    for _ in range(2 * RUNS):
        enter(ledger, "nodes", [], "c")
    assert len(ledger.read_text().splitlines()) == 2 + RUNS
    assert enter(ledger, "unit", ["a"], "c") == ["a"]
    for _ in range(RUNS):
        enter(ledger, "unit", [], "c")
    assert enter(ledger, "unit", ["a"], "c") == []


def test_line_that_cannot_be_read_costs_itself_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = tmp_path / "repeated.jsonl"
    for _ in range(2):
        enter(ledger, "unit", ["a"], "c")
    with ledger.open("a") as out:
        out.write('{"lane": "un\n[1]\n')
    assert enter(ledger, "unit", ["a"], "c") == ["a"]
    said = capsys.readouterr().err
    assert f"{ledger}:3: " in said
    assert f"{ledger}:4: " in said


def test_commit_is_named_with_whether_files_differ_from_it(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == ""
    git = ["git", "-c", "user.name=n", "-c", "user.email=n@example.com"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q", "."], ["add", "file"], ["commit", "-qm", "c"], ["tag", "v1"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    clean = commit_of(tmp_path)
    assert len(clean) == 12
    (tmp_path / "file").write_text("2")
    assert commit_of(tmp_path) == f"{clean}-dirty"
