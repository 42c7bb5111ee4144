"""`everstep doctor` says which private names of the installed libraries are missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everstep.cli.main import app
from everstep.torch_private import names
from everstep.torch_private.table import TESTED, Names

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "doctor.md"


def columns(text: str) -> list[tuple[str, str]]:
    """Of each row the library and what it was tested with, as far as the table goes; with the heads of the columns."""
    heads, *rows = text.splitlines()[1:]
    named = [row.split() for row in rows if row.split()[2:3] and row.split()[0] in TESTED]
    return [("heads", heads.strip()), *((row[0], row[2]) for row in named)]


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = Names("groups", "torch.distributed", "_gone", "what it is for", "2.0", "a public way")
    no_module = Names("groups", "torch.distributed.no_such_module", "_gone", "why", "2.0", "none yet")
    elsewhere = Names("storage", "urllib3.connection", "_gone", "why", "2.8.0", "none yet")  # looked at in a process
    monkeypatch.setattr(names, "TABLE", (lacking, no_module, elsewhere))
    report = CliRunner().invoke(app, ["doctor", "--json"])
    assert report.exit_code == 1
    found = json.loads(report.stdout)
    assert [one["name"] for one in found["missing"]] == [
        "torch.distributed._gone", "torch.distributed.no_such_module", "urllib3.connection._gone",
    ]  # fmt: skip
    assert found["missing"][0]["for"] == "what it is for"
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 1
    assert "MISSING torch.distributed._gone: what it is for" in shown.stdout
    assert f'pip install "{TESTED["torch"]}"' in shown.stdout
    sample = PAGE.read_text().partition("$ everstep doctor\n")[2].partition("```")[0]
    assert columns(sample) == columns(shown.stdout), "the page's sample has the rows of the output"
