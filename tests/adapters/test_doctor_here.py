"""`everstep doctor` finds nothing missing in the libraries that are installed here.

Beside the adapters, because it imports their libraries.
"""

from __future__ import annotations

import json

import torch
from typer.testing import CliRunner

from everstep.cli.main import app
from everstep.torch_private.table import TESTED


def test_doctor_finds_nothing_missing_here() -> None:
    report = CliRunner().invoke(app, ["doctor", "--json"])
    assert report.exit_code == 0, report.stdout
    versions = {one["name"]: one["version"] for one in json.loads(report.stdout)["libraries"]}
    assert versions["torch"] == torch.__version__
    assert list(versions) == list(TESTED)
