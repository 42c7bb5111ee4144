"""A script that a program of ours runs finds what it finds under `python SCRIPT`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = '''"""What it finds."""
import json, sys

seen = sorted(name for name in globals())
x: "int" = 3


class Own:
    pass


found = {
    "names": seen, "argv": sys.argv, "path": sys.path[0], "file": __file__, "doc": __doc__, "name": __name__,
    "annotations": __annotations__, "class": sys.modules[Own.__module__].Own is Own,
    "builtins": type(__builtins__).__name__, "spec": repr(__spec__), "future": eval("1 if True else 0"),
}
print(json.dumps(found))
'''
OURS = "import sys; from everstep.contract.main_script import run_script; run_script(sys.argv[1], sys.argv[2:])"


@pytest.mark.parametrize("name", ["train.py", "linked.py"])
def test_script_finds_what_it_finds_under_python(tmp_path: Path, name: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "train.py").write_text(SCRIPT)
    (tmp_path / "real" / "linked.py").symlink_to(tmp_path / "real" / "train.py")
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "linked.py").symlink_to(tmp_path / "real" / "train.py")
    script = str(tmp_path / ("beside" if name == "linked.py" else "real") / name)
    found = [
        json.loads(subprocess.check_output([sys.executable, *argv], text=True))
        for argv in ([script, "--a", "1"], ["-c", OURS, script, "--a", "1"])
    ]
    assert found[0] == found[1]


def test_script_that_is_not_there_is_an_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('missing')")
    for script, kind in ((tmp_path / "none.py", "ScriptUnreadable"), (tmp_path / "train.py", "FileNotFoundError")):
        done = subprocess.run([sys.executable, "-c", OURS, script], capture_output=True, text=True, check=False)
        assert kind in done.stderr.splitlines()[-1]
