"""Files in a temporary folder that others may write to: what somebody planted there is neither used nor followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.agent.processes import stacks
from everstep.contract import private


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's temporary folder."""
    folder = tmp_path / "tmp"
    folder.mkdir(mode=0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """What somebody would have this user write over."""
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


def name_of(shared: Path) -> Path:
    return shared / f"everstep-stacks-{os.getuid()}"


def link_to_folder(path: Path, aside: Path) -> None:
    aside.mkdir(mode=0o700)
    path.symlink_to(aside)


def open_folder(path: Path, _: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def file(path: Path, _: Path) -> None:
    path.write_text("")


def dangling_link(path: Path, aside: Path) -> None:
    path.symlink_to(aside)


@pytest.mark.parametrize("plant", [link_to_folder, open_folder, file, dangling_link])
def test_folder_that_somebody_planted_is_refused_and_stacks_go_elsewhere(
    shared: Path, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    plant(name_of(shared), tmp_path / "aside")
    with pytest.raises(PermissionError, match="remove it, or set TMPDIR"):
        private.folder("stacks")
    kept = stacks.keep(stacks.folder_of("job", None), "round-1.txt", "where it was")
    assert kept is not None
    assert kept.read_text() == "where it was"
    assert name_of(shared) not in kept.parents
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    assert not list((tmp_path / "aside").glob("*")) if (tmp_path / "aside").exists() else True


def test_folder_of_another_user_is_refused(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # then it is I who made it for another
    name_of(shared).mkdir(mode=0o700)
    with pytest.raises(PermissionError):
        private.folder("stacks")


def test_planted_link_is_replaced_and_not_followed(shared: Path, victim: Path) -> None:
    folder = stacks.folder_of("job", None)
    folder.mkdir(parents=True)
    (folder / "round-1.txt").symlink_to(victim)
    (folder / "round-2.txt").symlink_to(folder / "nowhere")
    for name in ("round-1.txt", "round-2.txt"):
        kept = stacks.keep(folder, name, "where it was")
        assert kept is not None
        assert not kept.is_symlink()
        assert kept.read_text() == "where it was"
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert victim.read_text() == "precious"
    assert not (folder / "nowhere").exists()


def test_run_folder_that_is_a_link_is_not_written_through(shared: Path, tmp_path: Path) -> None:
    aside = tmp_path / "aside"
    aside.mkdir()
    folder = stacks.folder_of("job", None)
    folder.symlink_to(aside)
    assert stacks.keep(folder, "round-1.txt", "where it was") is None
    assert list(aside.iterdir()) == []


@pytest.mark.parametrize("run", ["..", ".", "", "a/../../b", "x" * 500])
def test_run_id_cannot_leave_the_folder(shared: Path, run: str) -> None:
    assert stacks.folder_of(run, None).resolve().parent == name_of(shared).resolve()


def test_only_the_newest_are_kept_and_links_among_them_harm_nobody(
    shared: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "KEPT", 3)
    folder = stacks.folder_of("job", None)
    folder.mkdir(parents=True)
    (folder / "old").symlink_to(victim)
    os.utime(folder / "old", (1, 1), follow_symlinks=False)
    for number in range(6):
        stacks.keep(folder, f"round-{number}.txt", "x")
    assert len(list(folder.iterdir())) == 3
    assert victim.read_text() == "precious"


def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        private.write(tmp_path / "taken", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
