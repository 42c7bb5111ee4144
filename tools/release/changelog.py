"""CHANGELOG.md, in the form of Keep a Changelog: a section for each version, the newest first, under `[Unreleased]`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from release.errors import ReleaseError

FILE = "CHANGELOG.md"
UNRELEASED = "Unreleased"
HEADING = re.compile(r"^## (.*)\n", re.MULTILINE)
TITLE = re.compile(r"\[(.+)\](?: - (\d{4}-\d\d-\d\d))?")
CHANGES = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


@dataclass(frozen=True, slots=True)
class Section:
    """`date` is that of the release, "" for what is not released."""

    name: str
    date: str
    text: str


def sections(root: Path) -> list[Section]:
    """All sections. Raises `ReleaseError` that names a heading of another form."""
    _, *parts = HEADING.split((root / FILE).read_text())
    result = []
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        match = TITLE.fullmatch(title)
        if match is None or (match[1] == UNRELEASED) == bool(match[2]):
            raise ReleaseError(f"{FILE}: `## {title}` is neither `## [{UNRELEASED}]` nor `## [VERSION] - YYYY-MM-DD`")
        wrong = set(re.findall(r"^### (.*)$", text, re.MULTILINE)) - set(CHANGES)
        if wrong:
            raise ReleaseError(f"{FILE}: `### {min(wrong)}` below `## {title}` is none of {', '.join(CHANGES)}")
        result.append(Section(match[1], match[2] or "", text.strip()))
    if not result or result[0].name != UNRELEASED:
        raise ReleaseError(f"{FILE}: its first section is not `## [{UNRELEASED}]`")
    return result


def released(root: Path) -> list[Version]:
    """The versions that have a section, the newest first. Raises `ReleaseError` where they are in another order."""
    try:
        versions = [Version(section.name) for section in sections(root)[1:]]
    except InvalidVersion as e:
        raise ReleaseError(f"{FILE}: {e}") from e
    if versions != sorted(set(versions), reverse=True):
        raise ReleaseError(f"{FILE}: its versions are not in order, the newest first: {', '.join(map(str, versions))}")
    return versions


def section(root: Path, version: str) -> Section:
    """That of a release. Raises `ReleaseError` if there is none, or nothing in it."""
    for candidate in sections(root):
        if candidate.name == version and candidate.text:
            return candidate
    raise ReleaseError(f"{FILE} has no section `## [{version}] - YYYY-MM-DD` with changes: run `make version`")


def with_release(root: Path, version: str, date: str) -> str:
    """The file's text with what is unreleased under `version`. Raises `ReleaseError` if nothing is unreleased."""
    if not sections(root)[0].text:
        raise ReleaseError(f"{FILE}: nothing is below `## [{UNRELEASED}]`, so there is nothing to release")
    heading = f"## [{UNRELEASED}]\n"
    return (root / FILE).read_text().replace(heading, f"{heading}\n## [{version}] - {date}\n", 1)
