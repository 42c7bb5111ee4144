"""Wheels, source distributions and the chart's package, the same bytes from the same commit.

They are built twice, from two copies of the commit's files in folders of different names, and compared. What builds
them is installed from requirements/build.txt by its hashes.
"""

from __future__ import annotations

import filecmp
import shutil
import sys
import tarfile
from pathlib import Path

from release.commands import UV, git, run
from release.errors import ReleaseError
from release.manifests import CHART, helm
from release.versions import DISTRIBUTIONS


def epoch(root: Path) -> str:
    """SOURCE_DATE_EPOCH: when the commit was made, in seconds."""
    return git(root, "log", "-1", "--format=%ct")


def export(root: Path, folder: Path) -> None:
    """The files of the commit, with its time."""
    archive = folder.with_suffix(".tar")
    folder.mkdir(parents=True)
    git(root, "archive", "--format=tar", "-o", str(archive), "HEAD")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    archive.unlink()


def build(sources: Path, folder: Path, time: str) -> None:
    """The five distributions and the chart of `sources`, into `folder`."""
    lock = sources / "requirements/build.txt"
    isolated = ("--python", sys.executable, "--build-constraints", lock, "--require-hashes", "--no-create-gitignore")
    for source in DISTRIBUTIONS.values():
        command = (UV, "build", "-q", "--wheel", "--sdist", *isolated, "-o", folder, sources / source)
        run(*command, SOURCE_DATE_EPOCH=time)
    helm("package", sources / CHART, "-d", folder)


def build_twice(root: Path, folder: Path, work: Path) -> None:
    """Into `folder`, with `work` for copies. Raises `ReleaseError` that names what differs between two builds."""
    time = epoch(root)
    again = work / "again"
    for sources, out in ((work / "one", folder), (work / "another/folder", again)):
        export(root, sources)
        build(sources, out, time)
    names = {path.name for out in (folder, again) for path in out.iterdir()}
    same, _, _ = filecmp.cmpfiles(folder, again, names, shallow=False)
    if names - set(same):
        raise ReleaseError(f"two builds of one commit differ: {', '.join(sorted(names - set(same)))}")
    shutil.rmtree(again)
