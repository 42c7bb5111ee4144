"""The commands that the documents show are typed as they stand there, and none is left without a test."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from everstep_local.run.control import ControlError, RunAddress, ask
from support import ROOT
from support.scenarios import document
from support.scenarios.document import ENDED, FIRST, LOCAL, PLAYED

PROVEN = [ROOT / "README.md", ROOT / "docs/tutorial.md", *sorted((ROOT / "docs").glob("how-to-*.md"))]
PROSE = 800  # words of README.md
CHANGES = ("kill", "scale", "suspend", "resume")  # commands after which the job has another round
HOLDS = 150.0  # seconds until a run trains with all workers


class Terminals:
    """The first one has `everstep run`; commands of the second are typed when the run trains with all workers."""

    def __init__(self, folder: Path) -> None:
        # Their sockets lie here, and the path of one has a limit.
        self.environment = {**os.environ, "TMPDIR": str(folder)}
        self.environment.pop("XDG_RUNTIME_DIR", None)
        self.output = folder / "first-terminal"
        self.first: subprocess.Popen[bytes] | None = None
        self.round = 0

    def open_first(self, commands: list[str]) -> None:
        with self.output.open("wb") as file:
            self.first = subprocess.Popen(
                ["bash", "-c", _script([*commands[:-1], f"exec {commands[-1]}"])],
                cwd=ROOT, env=self.environment, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def type(self, command: str) -> str:
        """In the second terminal; its output."""
        done = subprocess.run(
            ["bash", "-c", _script(["source .venv/bin/activate", command])],
            cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.said()}"
        if any(f"everstep {verb}" in command for verb in CHANGES):
            self.until_trained(above=self.round)
        return done.stdout

    def until_trained(self, above: int = 0) -> None:
        deadline = time.monotonic() + HOLDS
        while True:
            view = self._view()
            if view.get("status") == "Running" and view["round"] > above:
                self.round = view["round"]
                return
            assert time.monotonic() < deadline, f"{view}\n{self.said()}"
            time.sleep(0.3)

    def _view(self) -> dict[str, Any]:
        """What `everstep status -o json` says; it is asked here, because an interpreter for each look takes longer."""
        folder = Path(self.environment["TMPDIR"]) / f"everstep-{os.getuid()}"
        for path in folder.glob("*.sock"):
            with contextlib.suppress(ControlError):  # it does not answer yet, or not any more; it is asked again
                for answer in ask(RunAddress(path.stem, 0, path), "status"):
                    return dict(answer["view"])
        return {}

    def until_ended(self) -> None:
        assert self.first is not None
        assert self.first.wait(240) == 0, self.said()

    def said(self) -> str:
        return self.output.read_text(errors="replace")[-3000:] if self.output.exists() else ""

    def close(self) -> None:
        if self.first is not None and self.first.poll() is None:
            self.first.send_signal(signal.SIGINT)
            self.first.wait(60)


def _script(commands: list[str]) -> str:
    return "\n".join(["set -euo pipefail", *commands])


@pytest.fixture
def terminals() -> Iterator[Terminals]:
    with tempfile.TemporaryDirectory(prefix="docs-", ignore_cleanup_errors=True) as folder:
        made = Terminals(Path(folder))
        yield made
        made.close()


def _pages() -> Iterator[Any]:
    """Those with commands to type here."""
    for path in PROVEN:
        if document.of(path, FIRST, LOCAL, ENDED):
            yield pytest.param(path, id=path.relative_to(ROOT).as_posix())


@pytest.mark.long_but("docs/how-to-shared-filesystem.md")
@pytest.mark.timeout(720)
@pytest.mark.parametrize("path", list(_pages()))
def test_local_commands_of_a_document_end_well_as_they_stand_there(path: Path, terminals: Terminals) -> None:
    for block in document.read(path):
        if block.how == FIRST:
            terminals.open_first(list(block.commands))
            terminals.until_trained()
            assert json.loads(terminals.type("everstep status -o json"))["status"] == "Running"
        elif block.how == ENDED:
            terminals.until_ended()
        if block.how in (LOCAL, ENDED):
            for command in block.commands:
                terminals.type(command)


@pytest.mark.parametrize("path", PROVEN, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_command_of_a_document_is_run_by_a_test_or_said_to_be_unproven(path: Path) -> None:
    text = path.read_text()
    for block in document.read(path):
        assert block.how, f"no comment says what runs {block.commands}"
        if block.how in PLAYED:
            continue
        way, _, rest = block.how.partition(" ")
        if way == "by":
            assert (ROOT / rest).is_file(), block
        else:
            assert block.how.startswith("no, "), block
            assert "unproven" in text, "the reader is to be told, too"


def test_job_that_the_readme_shows_is_that_of_the_example() -> None:
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    example = yaml.safe_load((ROOT / "examples/digits/elastic.yaml").read_text())
    assert _is_part(yaml.safe_load(shown), example)


def _is_part(part: Any, whole: Any) -> bool:
    match part:
        case dict():
            return all(key in whole and _is_part(value, whole[key]) for key, value in part.items())
        case list():
            return len(part) == len(whole) and all(map(_is_part, part, whole))
    return bool(part == whole)


def test_readme_can_be_read_in_minutes() -> None:
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    assert len(" ".join(prose).split()) <= PROSE
