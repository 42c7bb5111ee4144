"""The notebook of examples/notebook, all cells in a real kernel."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.client import TrainingClient
from support import ROOT
from support.scenarios.player import wait_for

NOTEBOOK = ROOT / "examples/notebook/jobs.ipynb"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the notebook, whose kernel finds the programs of this environment. No run is left after it."""
    shutil.copy(NOTEBOOK, tmp_path)
    with tempfile.TemporaryDirectory() as sockets:  # a socket's path has a limit
        monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        monkeypatch.chdir(tmp_path)
        yield tmp_path
        client = TrainingClient(local=True)
        for job in client.list_jobs():
            if not job.ended:
                client.delete_job(job.name)
        wait_for("no run is left", lambda: all(job.ended for job in client.list_jobs()), 60)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_cells_of_the_notebook_show_a_job_that_loses_a_worker_grows_and_completes(folder: Path) -> None:
    import nbformat  # noqa: PLC0415 - seconds, with jsonschema
    from nbclient import NotebookClient  # noqa: PLC0415 - the same

    notebook = nbformat.read(folder / NOTEBOOK.name, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs before you commit"
    NotebookClient(
        notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    shown = [
        "\n".join(str(output.get("text") or output.get("data")) for output in cell.outputs)
        for cell in notebook.cells
        if cell.get("outputs")
    ]
    running, first_lines, killed, recovered, grown, events, ended, commits, last_lines = shown
    assert "Running" in running
    assert "step 20, 2 workers, loss" in first_lines
    assert "spirals-w1-0" in killed
    assert "<td>Running</td>" in recovered
    assert "spirals-w2-0" in grown
    assert all(reason in events for reason in ("WorldFormed", "WorkerLost"))
    assert "<td>Complete</td>" in ended
    assert "<td>400</td>" in commits
    assert "step 400, 3 workers, loss" in last_lines
