"""`make version VERSION=0.2.0`: write the version into every place that has it, to be committed.

A version of a release also gets what is unreleased in the changelog, and keeps its CRD for the next one to be compared
with. Behind a release the next version with `.dev0` follows.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from release import changelog, commands, crd, manifests, versions
from release.errors import ReleaseError


def bump(root: Path, version: str, date: str) -> None:
    """All files of the checkout, or none. Raises `ReleaseError`."""
    parsed = versions.parse(version, versions.RELEASE, versions.DEVELOPMENT)
    present = versions.parse(versions.current(root), versions.RELEASE, versions.DEVELOPMENT)
    newest = max([present, *changelog.released(root)])
    if parsed <= newest:
        raise ReleaseError(f"VERSION={version} is not newer than {newest}")
    commands.refuse_changes(root)
    texts = versions.changed(root, version)
    if versions.RELEASE.fullmatch(version):
        crd.check_release(root, version)
        texts[changelog.FILE] = changelog.with_release(root, version, date)
        texts[f"{crd.RELEASED}/{version}.yaml"] = (root / crd.CURRENT).read_text()
    texts[manifests.INSTALL] = _install(root, texts[versions.CHART])
    for path, text in texts.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text)


def _install(root: Path, chart: str) -> str:
    """install.yaml of the chart with another Chart.yaml."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "everstep"
        shutil.copytree(root / manifests.CHART, copy)
        (copy / "Chart.yaml").write_text(chart)
        return manifests.install(copy)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make version", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version")
    version = parser.parse_args().version

    def work() -> None:
        bump(versions.ROOT, version, datetime.now(UTC).date().isoformat())
        after = "Look at `git diff`, then: make setup && git add -A && git commit"
        print(f"The checkout has the version {version}. {after}")

    return commands.ended("make version", work)


if __name__ == "__main__":
    sys.exit(main())
