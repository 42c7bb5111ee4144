"""A repository of this checkout's files with the version of a release, of which a test makes that release."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from release import changelog, crd, manifests, versions
from support import ROOT

VERSION = "9.8.7"  # newer than any here
# What the checks of a release read.
CHECKED = (*{place.path for place in versions.PLACES}, changelog.FILE, crd.CURRENT, manifests.INSTALL, ".gitignore")


def git(folder: Path, *arguments: str) -> str:
    """A commit has the same author and time in each test."""
    who = {f"GIT_{role}_{key}": f"a@{role}" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    when = {f"GIT_{role}_DATE": "2026-12-01T12:00:00Z" for role in ("AUTHOR", "COMMITTER")}
    command = ("git", "-C", str(folder), *arguments)
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **who, **when})
    return done.stdout.strip()


def checkout(folder: Path, files: tuple[str, ...] = ()) -> Path:
    """`files` as they are here, all that git knows or would know by default, and one commit of them."""
    everything = git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    for path in files or everything:
        if (ROOT / path).is_file():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / path)
    git(folder, "init", "-q")
    commit(folder)
    return folder


def commit(folder: Path) -> str:
    """All that is there; the commit."""
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "one")
    return git(folder, "rev-parse", "HEAD")


def with_version(folder: Path, version: str = VERSION) -> str:
    """What `make version` writes, but for the rendered chart, and a commit of it."""
    texts = versions.changed(folder, version)
    texts[changelog.FILE] = changelog.with_release(folder, version, "2026-12-01")
    for path, text in texts.items():
        (folder / path).write_text(text)
    return commit(folder)
