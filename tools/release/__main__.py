"""`make release VERSION=0.2.0`: all files of a release in dist/VERSION, or an error and none.

What can be refused is refused before anything is built. Nothing is published: docs/operations/releasing.md has the
commands for that.
"""

from __future__ import annotations

import argparse
import hashlib
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lanes.lanes import LANES
from packaging.version import Version

from release import build, changelog, commands, crd, environments, manifests, results, versions
from release.errors import ReleaseError

SUMS = "SHA256SUMS"
NOTES = "RELEASE_NOTES.md"


@dataclass(frozen=True, slots=True)
class Checked:
    """What a release needs to know of a commit that may be released. `tests` is empty where nobody ran them."""

    commit: str
    section: changelog.Section
    tests: Counter[str]


def check(root: Path, version: str, without_results: bool) -> Checked:
    """Raises `ReleaseError` for the first thing that forbids the release."""
    parsed = versions.parse(version, versions.RELEASE)
    if versions.current(root) != version:
        raise ReleaseError(
            f"the checkout has the version {versions.current(root)}: run `make version VERSION={version}`, commit, "
            "and let `make nightly` run on that commit"
        )
    differing = versions.differing(root)
    if differing:
        raise ReleaseError(f"{differing[0]}: run `make version VERSION={version}`")
    section = changelog.section(root, version)
    newer = [one for one in changelog.released(root) if one > parsed]
    if newer:
        raise ReleaseError(f"VERSION={version} is not newer than {newer[0]}, which {changelog.FILE} has")
    for program in (commands.UV, commands.CYCLONEDX):
        commands.run(program, "--version")
    commands.refuse_changes(root)
    commit = commands.git(root, "rev-parse", "HEAD")
    _refuse_tags(root, parsed, commit)
    if (root / "dist" / version).exists():
        raise ReleaseError(f"dist/{version} is there already: remove it to make the release again")
    tests = Counter[str]() if without_results else results.counts(root / results.FILE, commit, LANES)
    crd.check_release(root, version)
    if manifests.install(root / manifests.CHART) != (root / manifests.INSTALL).read_text():
        raise ReleaseError(f"{manifests.INSTALL} is not the chart as it is now: run `make generate`, and commit")
    return Checked(commit, section, tests)


def _refuse_tags(root: Path, version: Version, commit: str) -> None:
    """Of a newer version, or of this version at another commit. A clone without tags has nothing to compare with."""
    for line in commands.git(
        root, "for-each-ref", "--format=%(refname:strip=2) %(objectname) %(*objectname)", "refs/tags"
    ).splitlines():
        name, *objects = line.split()
        try:
            tagged = versions.parse(name.removeprefix("v"), versions.RELEASE)
        except ReleaseError:
            continue  # a tag of something else
        if tagged > version:
            raise ReleaseError(f"VERSION={version} is not newer than the tag {name}")
        if tagged == version and commit not in objects:
            raise ReleaseError(f"the tag {name} is at another commit: a version is released once")


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that becomes it if the block ends well, and is removed if not."""
    folder.parent.mkdir(exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not any(folder.parent.iterdir()):
            folder.parent.rmdir()


def release(root: Path, version: str, torch: tuple[str, ...], without_results: bool) -> Path:
    """The folder of the release. Raises `ReleaseError`, and then there is none."""
    checked = check(root, version, without_results)
    _say("two builds, compared")
    with whole(root / "dist" / version) as out, tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        build.build_twice(root, out, work)
        sources = work / "one"
        _say("wheels for " + ", ".join(environments.ARCHITECTURES))
        environments.check_architectures(sources / "requirements", work)
        shutil.copytree(sources / "requirements", out / "requirements")
        shutil.copytree(sources / "manifests", out / "manifests", ignore=shutil.ignore_patterns("released"))
        (out / "sbom").mkdir()
        for name in versions.DISTRIBUTIONS:
            _say(f"{name}: an environment of its wheel and the locked versions, its SBOM")
            python = environments.check(name, version, out, sources / "requirements", torch, work / name)
            dockerfile = (sources / "Dockerfile").read_text()
            for file, text in environments.sboms(name, version, python, out, dockerfile, build.epoch(root)).items():
                (out / "sbom" / file).write_text(text)
            shutil.rmtree(work / name)
        if checked.tests:
            shutil.copyfile(root / results.FILE, out / results.FILE)
        (out / NOTES).write_text(notes(version, checked))
        (out / SUMS).write_text(sums(out))
    return root / "dist" / version


def notes(version: str, checked: Checked) -> str:
    """The text of `NOTES`: what has changed, and what was tested."""
    if checked.tests:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(checked.tests.items()))
        tested = f"`make nightly` on this commit: {outcomes} ({results.FILE})."
    else:
        tested = "**The whole test suite was not run on this commit**: the release was made without its results."
    return (
        f"# Everstep {version}, {checked.section.date}\n\nCommit {checked.commit}. {tested}\n\n{checked.section.text}\n"
    )


def sums(folder: Path) -> str:
    """As `sha256sum` prints them, of all files below `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n" for path in files)


def _say(text: str) -> None:
    print(f"make release: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make release", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version")
    parser.add_argument("--torch", required=True, help="the arguments by which pip installs PyTorch")
    parser.add_argument("--without-results", action="store_true", help=f"without {results.FILE}; the notes say so")
    arguments = parser.parse_args()

    def work() -> None:
        torch = tuple(shlex.split(arguments.torch))
        folder = release(versions.ROOT, arguments.version, torch, arguments.without_results)
        _say(f"{folder.relative_to(versions.ROOT)} has {len(list(folder.rglob('*')))} files, {SUMS} their sums")

    return commands.ended("make release", work)


if __name__ == "__main__":
    sys.exit(main())
