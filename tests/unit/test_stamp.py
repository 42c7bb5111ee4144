"""A rehearsal's stamp: which part of a program differs first, and what is no stamp."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everstep.contract.stamp import MOST_BYTES, WRITTEN, Program, Stamp, object_name
from everstep.rehearse import stamp as stamps
from everstep.rehearse.plan import PlanError

VERSIONS = {"python": "3.11.7", "torch": "2.13.0+cpu"}
PROGRAM = Program({"__main__": "a", "net": "b"}, "c", VERSIONS, "cpu", {"2": "d", "4": WRITTEN})
STAMP = Stamp(PROGRAM, 3, 40, "2026-11-29T20:01:02Z")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        ({"modules": {"__main__": "x", "net": "b"}}, "the script has another text"),
        ({"modules": {"__main__": "a", "net": "x"}}, "the module net has another text"),
        ({"modules": {"__main__": "a"}}, "the module net is not found"),
        ({"modules": {**PROGRAM.modules, "more": "x"}}, "the module more was not there"),
        ({"arguments": "x"}, "its arguments are others"),
        ({"files": {"2": "x", "4": ""}}, "the file that its argument 2 names has another content"),
        ({"files": {"4": ""}}, "the file that its argument 2 names is not there"),
        ({"files": {"2": "d", "3": "x"}}, "the file that its argument 3 names was not there"),
        ({"files": {"2": "d", "4": "x"}}, None),  # the script writes it
        ({"files": {"2": "d"}}, None),
        ({"versions": {"python": "3.11.7", "torch": "2.14.0"}}, "torch is 2.14.0, and was 2.13.0+cpu"),
        ({"versions": {"python": "3.11.7"}}, "torch is not there, and was 2.13.0+cpu"),
        ({"device": "cuda"}, "it runs on cuda, and was rehearsed on cpu"),
    ],
)
def test_first_part_that_differs_is_named(changed: dict[str, Any], says: str | None) -> None:
    assert PROGRAM.difference(replace(PROGRAM, **changed)) == says


def test_stamp_is_read_as_it_was_written() -> None:
    assert Stamp.decode(STAMP.encode()) == STAMP
    assert str(STAMP) == "2026-11-29, 3 ranks, 40 steps"


BODY = json.loads(STAMP.encode())


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b" " * (MOST_BYTES + 1), "more than"),
        (b"[]", "no stamp of version 2"),
        (json.dumps({**BODY, "version": 1}).encode(), "no stamp of version 2"),
        (json.dumps({**BODY, "program": []}).encode(), "program: an object"),
        (json.dumps({**BODY, "program": {**BODY["program"], "modules": {"a": 1}}}).encode(), "modules: an object of"),
        (json.dumps({**BODY, "program": {**BODY["program"], "files": {"a": "b"}}}).encode(), "files: numbers of arg"),
        (json.dumps({**BODY, "steps": True}).encode(), "steps: a whole number"),
        (json.dumps({**BODY, "steps": 2**70}).encode(), "steps: a whole number"),
        (json.dumps({**BODY, "at": None}).encode(), "at: a text"),
    ],
)
def test_what_is_no_stamp_is_an_error_that_names_the_part(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Stamp.decode(data)


@pytest.mark.parametrize("script", ["train.py", "my script.py", "ü.py", "a%b.py"])
def test_stamp_of_any_script_is_written_below_a_url_and_withdrawn(tmp_path: Path, script: str) -> None:
    where = stamps.write(str(tmp_path / "commits"), tmp_path / script, STAMP)
    assert where == f"file://{tmp_path}/commits/{object_name(script)}"
    assert Stamp.decode((tmp_path / "commits" / object_name(script)).read_bytes()) == STAMP
    stamps.withdraw(str(tmp_path / "commits"), tmp_path / script)
    assert not (tmp_path / "commits" / object_name(script)).exists()


def test_place_that_cannot_be_used_is_refused_before_anything_runs() -> None:
    with pytest.raises(PlanError, match=r"--stamp s3:/bucket: .*s3://bucket"):
        stamps.check("s3:/bucket", ("rank", "all"))


def test_programs_of_all_processes_are_one_and_a_file_that_was_changed_meanwhile_makes_none(tmp_path: Path) -> None:
    notes = []
    files = {"1": "same", "2": "of the end"}
    for i, modules in enumerate(({"__main__": "a"}, {"__main__": "a", "late": "b"}, {"__main__": "x"})):
        (tmp_path / f"run-{i}").mkdir()
        notes.append(Program(modules, "c", {"torch": "2.13.0"}, "cpu", files))
    assert stamps.program_of(tmp_path) is None
    for i, program in enumerate(notes[:2]):
        stamps.note(tmp_path / f"run-{i}", program, files if i else {"1": "same"})
    found = stamps.program_of(tmp_path)
    assert found is not None
    assert found.modules == {"__main__": "a", "late": "b"}
    assert found.files == {"1": "same", "2": WRITTEN}
    stamps.note(tmp_path / "run-2", notes[2], files)
    assert stamps.program_of(tmp_path) is None
