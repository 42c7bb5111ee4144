"""`everstep report` of a run that has ended: its logs without secrets, and what could not be read."""

from __future__ import annotations

import json
import tarfile
from dataclasses import asdict
from pathlib import Path

import pytest

from everstep.cli.jobs.view import View, WorkerRow
from support.commands import caller


def test_logs_are_there_without_secrets_and_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    rows = [WorkerRow(n, f"train-w{n}-0", "node-1", "Failed", None, None, 0, None) for n in range(2)]
    view = View.unknown("train").to_json() | {"workers": [asdict(row) for row in rows]}
    (tmp_path / "out" / "logs").mkdir(parents=True)
    (tmp_path / "out" / "status.json").write_text(json.dumps(view))
    key = ["-----BEGIN PRIVATE KEY-----", *["aB3" * 20] * 3, "-----END PRIVATE KEY-----"]
    long = [f"step={n} " + "x" * 300 for n in range(1500)]  # more than `redact` looks at in one piece
    lines = [*long, "password=swordfish", *key, "last"]
    (tmp_path / "out" / "logs" / "train-w0-0.log").write_text("".join(f"00:00:00 {line}\n" for line in lines))
    caller()("report", "train", "--out", "out", "--file", "r.tar.gz")
    with tarfile.open("r.tar.gz") as archive:
        files = {each.name: archive.extractfile(each).read().decode() for each in archive.getmembers()}  # type: ignore[union-attr]
    log = files["r/logs/train-w0-0.log"].splitlines()
    assert log[:1500] == long
    assert log[-1] == "last"
    assert "swordfish" not in "".join(log)
    assert "aB3aB3" not in "".join(log)
    problems = files["r/problems.txt"].splitlines()
    assert problems[0].startswith("events: ")
    assert problems[1].startswith("log of train-w1-0: no log of")
