"""Each test asks for the system programs that it uses: by one list, from which a new machine gets what it lacks."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from testcluster import packages, toolchains, versions  # tests/conftest.py put it on the path
from testcluster.proc import ClusterError

ROOT = Path(__file__).resolve().parents[2]


def test_a_program_that_the_folder_does_not_declare_is_not_started() -> None:
    with pytest.raises(
        RuntimeError, match=r"test_programs\.py.* starts iptables, which .*packages\.py does not declare"
    ):
        subprocess.run(["iptables", "--version"], check=False)
    with pytest.raises(RuntimeError, match="starts /usr/sbin/iptables"):
        subprocess.run(["/usr/sbin/iptables", "--version"], check=False)


def test_a_missing_program_is_named_with_its_package_and_who_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(packages.PACKAGES, "everstep-no-such-program", "everstep-no-such-package")
    monkeypatch.setenv("PATH", str(tmp_path))  # no apt-get there
    with pytest.raises(ClusterError) as told:
        packages.ensure(["everstep-no-such-program"], "lane servers")
    assert str(told.value).startswith(
        "lane servers: uses everstep-no-such-program, not installed here. Install Debian's everstep-no-such-package"
    )


def test_every_declared_program_has_a_source_and_every_folder_and_marker_exists() -> None:
    for where, programs in (packages.FOLDERS | packages.MARKERS).items():
        assert set(programs) <= set(packages.PACKAGES), f"{where} uses a program of which no package is known"
    assert [folder for folder in packages.FOLDERS if not (ROOT / "tests" / folder).is_dir()] == []
    markers = re.findall(r'^  "(\w+): ', (ROOT / "pyproject.toml").read_text(), re.M)
    assert set(packages.MARKERS) <= set(markers)


@pytest.mark.parametrize(
    ("executable", "may"),
    [
        ("sh", True), ("/bin/sh", True), ("ip", False), ("/usr/sbin/ip", False), ("git", True), ("/usr/bin/git", True),
        ("python3", True), (str(ROOT / ".venv/bin/everstep"), True), ("/root/.cache/everstep/etcd/0/etcd", True),
    ],
)  # fmt: skip
def test_only_what_a_folder_declares_and_what_every_debian_has_may_be_started(executable: str, may: bool) -> None:
    assert packages.declared(executable, ["git"]) == may


def test_an_older_toolchain_of_the_machine_is_not_taken(tmp_path: Path) -> None:
    for name, old in (("go", "go version go1.19.8 linux/amd64"), ("node", "v18.20.4")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '{old}'\n")
        program.chmod(0o755)
        assert toolchains.version_of(str(program)) < {"go": versions.GO_LEAST, "node": versions.NODE_LEAST}[name]
    assert toolchains.version_of(str(tmp_path / "none")) == ()
