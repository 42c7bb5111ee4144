"""What others wrote reaches the terminal as text, from whichever command; numbers in the environment have one form."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from typer.testing import CliRunner

import everstep.cli
import everstep_local
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.manifest import NONE, CommitRecord
from everstep.checkpoint.format.wire import Json
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.log.decisions import Claim
from everstep.checkpoint.log.opening import Settings
from everstep.cli import ckpt
from everstep.cli.printing import SafeConsole, cell, safe, safe_line, say
from everstep.contract import env
from everstep.storage import open_store
from everstep_local.run.demo import SCRIPT
from support.processes.terminal import on_terminal

HOSTILE = "[/x][bold]\x1b]0;title\x07\x1b[2J\x9b31m\r\x00\u202e\ud800:smile:"


BAR = """
import time
from everstep.cli.printing import byte_bar
from support.processes.terminal import on_terminal
with byte_bar("verify", 8 * 2**20) as advance:
    for _ in range(8):
        advance(2**20)
        time.sleep(0.15)
"""


def test_bar_of_bytes_is_shown_on_a_terminal_goes_at_its_end_and_has_no_colour_without_being_asked() -> None:
    shown = on_terminal("-c", BAR)
    assert re.search(r"verify.*\d\.\d/8\.0 MiB", shown), shown
    assert shown.rindex("\x1b[2K") > shown.rindex("MiB"), "its line is cleared"
    assert re.search(r"\x1b\[[0-9;]*3[0-7]m", shown), "colours"
    assert not re.search(r"\x1b\[([0-9;]*;)?3[0-8][0-9;]*m", on_terminal("-c", BAR, NO_COLOR="1"))
    piped = subprocess.run([sys.executable, "-c", BAR], capture_output=True, check=True)
    assert piped.stderr == b""


@given(st.text())
def test_text_that_is_printed_holds_nothing_that_a_terminal_obeys(text: str) -> None:
    shown = safe(text)
    assert len(shown) == len(text)
    assert all(c in "\t\n" or (c.isprintable() or c.isspace() or ord(c) > 0x9F) for c in shown)
    shown.encode()
    assert safe("Grüße, 世界 🙂\n\tx") == "Grüße, 世界 🙂\n\tx"


def test_line_of_a_program_keeps_its_colours_and_nothing_else() -> None:
    assert safe_line("\x1b[31mred\x1b[0m \x1b[2Jx\x1b]0;t\x07") == "\x1b[31mred\x1b[0m \ufffd[2Jx\ufffd]0;t\ufffd"


def test_console_shows_markup_and_control_characters_as_text() -> None:
    file = io.StringIO()
    console = SafeConsole(file=file, force_terminal=True, width=200, color_system="standard")
    table = Table("A")
    table.add_row(cell(HOSTILE))
    table.add_row(cell(HOSTILE, "red"))
    table.add_row(HOSTILE)  # a command that forgot
    console.print(HOSTILE)
    console.print(table)
    shown = file.getvalue()
    assert shown.count("[/x][bold]") == 4
    assert shown.count(":smile:") == 4
    assert not any(c in shown for c in ("\x1b]", "\x1b[2J", "\x9b", "\x00", "\x07", "\u202e", "\ud800"))
    assert "\x1b[31m" in shown, "its own colours stay"


def test_say_prints_no_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"step 1 {HOSTILE}")
    assert "\x1b" not in capsys.readouterr().out


def test_commands_on_a_record_with_sequences_and_markup_print_text(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    log = CommitLog(store)
    odd = HOSTILE.replace("\ud800", "")
    own = log.open(Claim("aa", 1, "", 1, odd))
    values: Json = {"state": {odd: {"kind": "value", "tree": odd}}}
    draft = CommitRecord(NONE, "aa", 1, "", 7, "000000000000-aaaaaaaa-00000001", 1, odd, 0, NONE, (), (), values)
    log.commit(log.head(), own, draft)
    for arguments in (["ls"], ["show"], ["show", "--tensors"], ["verify"], ["ls", "--json"], ["cat", odd], ["gc"]):
        command, *rest = arguments
        more = ["--keep", "1"] if command == "gc" else []
        result = CliRunner().invoke(ckpt.app, [command, str(tmp_path), *rest, *more])
        assert result.exit_code in (0, 2), result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert not any(c in result.output for c in "\x1b\x9b\x00\x07\u202e\r"), arguments
    assert "[/x][bold]" in CliRunner().invoke(ckpt.app, ["ls", str(tmp_path)]).output


def test_no_command_prints_around_the_one_place() -> None:
    for package in (everstep.cli, everstep_local):
        assert package.__file__ is not None
        for path in sorted(Path(package.__file__).parent.rglob("*.py")):
            # A guard's lines are of its program alone, and the demo's script is a user's.
            if path.name in ("printing.py", "guard.py", SCRIPT.name):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                    assert "safe_line" in ast.unparse(node), f"{path}:{node.lineno}: print; use everstep.cli.printing"
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id != "Console", f"{path}:{node.lineno}: Console; use SafeConsole"


@pytest.mark.parametrize("value", ["nan", "1e400", "inf", "-inf", "-1", "x", "0x10", "1e30", "9" * 5000])
@pytest.mark.parametrize(
    "name",
    ["EVERSTEP_CHECKPOINT_KEEP", "EVERSTEP_CHECKPOINT_EVERY_STEPS", "EVERSTEP_CHECKPOINT_EVERY_SECONDS",
     "EVERSTEP_CHECKPOINT_MAX_LOADS", "EVERSTEP_CHECKPOINT_KEEP_EVERY_STEPS", "EVERSTEP_CHECKPOINT_KEEP_EVERY_HOURS"],
)  # fmt: skip
def test_number_that_is_none_is_refused_by_variable_value_and_form(name: str, value: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{name}='{value[:60]}': a (whole )?number from \d.* is expected"):
        Settings.resolve({name: value}, "memory://x", None, None, None, None, None, None)


def test_numbers_of_the_environment_are_read_in_one_way() -> None:
    assert env.whole_number({"A": " 12 "}, "A", 0) == 12
    assert env.whole_number({"A": ""}, "A", 7) == 7
    assert env.grace_seconds({}) == 30.0
    assert env.grace_seconds({"EVERSTEP_GRACE_SECONDS": "0"}) >= 1.0
    for text in ("1.5", "inf", "nan", "one"):
        with pytest.raises(env.BadVariable, match=f"A='{text}': a whole number from 0 to"):
            env.whole_number({"A": text}, "A", 0)
