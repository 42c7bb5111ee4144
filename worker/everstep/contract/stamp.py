"""The stamp that `everstep rehearse` leaves of a script that passed, and that a run of the same script reads.

A file of JSON, beside the script or below a checkpoint URL. It names texts and arguments by their digests only, because
an argument may be a secret. Invariant: whoever can write a stamp can have a run leave out a check, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

BESIDE_SCRIPT = ".everstep"  # the folder in that of the script, which holds what a checkpoint URL holds
MOST_BYTES = 2**20  # of a stamp
MOST_STEPS = 2**31
VERSION = 2
MAIN = "__main__"
WRITTEN = ""


@dataclass(frozen=True, slots=True)
class Program:
    """What a training process runs. `modules`: the digest of each file of the script's own, by the module's name.
    `arguments`: the digest of all arguments. `versions`: of Python and of libraries. `device`: the kind of accelerator,
    or "cpu". `files`: the digest of each file that an argument names, by the argument's number, from 1; `WRITTEN` for a
    file that the program writes itself, which says nothing of the program."""

    modules: Mapping[str, str]
    arguments: str
    versions: Mapping[str, str]
    device: str
    files: Mapping[str, str]

    def difference(self, now: Program) -> str | None:
        """The first part in which the program of `now` is not this one, in words; None if it is the same."""
        for name in sorted(self.modules.keys() | now.modules.keys()):
            what = "the script" if name == MAIN else f"the module {name}"
            if name not in now.modules:
                return f"{what} is not found"
            if name not in self.modules:
                return f"{what} was not there"
            if self.modules[name] != now.modules[name]:
                return f"{what} has another text"
        if self.arguments != now.arguments:
            return "its arguments are others"
        if (number := other_file(self.files, now.files)) is not None:
            return f"the file that its argument {number} names {_change(self.files.get(number), now.files.get(number))}"
        for name in sorted(self.versions.keys() | now.versions.keys()):
            was, is_now = self.versions.get(name, "not there"), now.versions.get(name, "not there")
            if was != is_now:
                return f"{name} is {is_now}, and was {was}"
        return None if self.device == now.device else f"it runs on {now.device}, and was rehearsed on {self.device}"


def unchanged(seen: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """`Program.files` of a program that had these at several times: what was not the same each time it writes itself,
    such as `--save model.pt`."""
    numbers = {number for files in seen for number in files}
    return {
        number: seen[0][number] if len({files.get(number) for files in seen}) == 1 else WRITTEN for number in numbers
    }


def other_file(was: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """The number of the first argument whose file is not what it was; None if there is none."""
    numbers = sorted(was.keys() | now.keys(), key=lambda number: (len(number), number))
    return next((number for number in numbers if WRITTEN != was.get(number) != now.get(number)), None)


@dataclass(frozen=True, slots=True)
class Stamp:
    """A rehearsal of `program` with so many `ranks` and `steps` found nothing. `at`: when, as RFC 3339."""

    program: Program
    ranks: int
    steps: int
    at: str

    def __str__(self) -> str:
        return f"{self.at[:10]}, {self.ranks} ranks, {self.steps} steps"

    def encode(self) -> bytes:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Stamp:
        """Raises `ValueError`, with what is wrong, for what is no stamp of this version."""
        if len(data) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"it is not JSON: {e}") from e
        if not isinstance(body, dict) or body.get("version") != VERSION:
            raise ValueError(f"it is no stamp of version {VERSION}")
        program = body.get("program")
        if not isinstance(program, dict):
            raise ValueError("program: an object is expected")
        return cls(
            Program(
                _texts(program, "modules"), _text(program, "arguments"), _texts(program, "versions"),
                _text(program, "device"), _files(program),
            ),
            _number(body, "ranks"), _number(body, "steps"), _text(body, "at"),
        )  # fmt: skip


def object_name(script: str) -> str:
    """The name of a script's stamp, below a checkpoint URL or in `BESIDE_SCRIPT`."""
    return f"rehearsed/{quote(Path(script).name, safe=' ')}.json"


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name}: a text is expected")
    return value


def _texts(body: Mapping[str, Any], name: str) -> dict[str, str]:
    value = body.get(name)
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError(f"{name}: an object of texts is expected")
    return value


def _files(program: Mapping[str, Any]) -> dict[str, str]:
    files = _texts(program, "files")
    if not all(number.isdecimal() for number in files):
        raise ValueError("files: numbers of arguments are expected")
    return files


def _change(was: str | None, is_now: str | None) -> str:
    """How a file has changed, of which these are the digests; None: it is not there."""
    return "was not there" if was is None else "is not there" if is_now is None else "has another content"


def _number(body: Mapping[str, Any], name: str) -> int:
    value = body.get(name)
    if type(value) is not int or not 0 < value < MOST_STEPS:
        raise ValueError(f"{name}: a whole number from 1 to {MOST_STEPS - 1} is expected")
    return value
