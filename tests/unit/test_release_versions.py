"""One version in all that is released, and a changelog in the form that a release reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import everstep
from everstep.client import client
from release import changelog, versions
from release.errors import ReleaseError
from support import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that have the version, and the changelog."""
    for path in {*(place.path for place in versions.PLACES), changelog.FILE}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, tmp_path / path)
    return tmp_path


def test_distributions_chart_and_images_have_one_version() -> None:
    assert versions.differing(ROOT) == []
    chart = yaml.safe_load((ROOT / versions.CHART).read_text())
    assert chart["appVersion"] == everstep.__version__ == versions.current(ROOT)
    assert chart["version"] == versions.semantic(everstep.__version__)
    # The operator's image has the tag appVersion by default; this is the workers' image.
    assert client.IMAGE.rpartition(":")[2] == chart["appVersion"]


def test_each_distribution_of_the_checkout_is_one_of_the_releases() -> None:
    assert sorted(versions.DISTRIBUTIONS.values()) == sorted(path.parent.name for path in ROOT.glob("*/pyproject.toml"))


def test_changelog_has_the_form_that_a_release_reads() -> None:
    assert changelog.sections(ROOT)[0].name == changelog.UNRELEASED
    final = Version(versions.current(ROOT))
    assert all(version <= final for version in changelog.released(ROOT))


@pytest.mark.parametrize("version", ["0.2.0", "0.2.0rc1", "0.3.0.dev0", "10.0.12"])
def test_new_version_is_in_every_place(checkout: Path, version: str) -> None:
    for path, text in versions.changed(checkout, version).items():
        (checkout / path).write_text(text)
    assert versions.current(checkout) == version
    assert versions.differing(checkout) == []
    assert all(place.versions(checkout) for place in versions.PLACES)


@pytest.mark.parametrize("path", sorted({place.path for place in versions.PLACES} - {versions.SOURCE.path}))
def test_place_with_another_version_is_named(checkout: Path, path: str) -> None:
    file = checkout / path
    place = next(one for one in versions.PLACES if one.path == path)
    file.write_text(place.changed(file.read_text(), "0.0.9"))
    (words,) = versions.differing(checkout)
    assert words == f"{path} has 0.0.9, and not {place.form(everstep.__version__)}"


def test_place_without_a_version_is_an_error_and_not_left_out(checkout: Path) -> None:
    (checkout / versions.CHART).write_text("name: everstep\n")
    with pytest.raises(ReleaseError, match=r"charts/everstep/Chart\.yaml has no version"):
        versions.changed(checkout, "0.2.0")


@pytest.mark.parametrize(
    "text",
    ["", "1", "0.2", "v0.2.0", "0.2.0-rc.1", "0.2.0rc", "0.2.0.post1", "0.2.0a1", "0.02.0", "0.2.0+cpu", "1!0.2.0"],
)
def test_version_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ReleaseError, match=r"has another form than 0\.2\.0 or 0\.2\.0rc1$"):
        versions.parse(text, versions.RELEASE)


def test_order_of_helms_versions_is_that_of_pythons() -> None:
    """Semantic versions compare what is behind the hyphen part by part, letters by their codes."""
    ordered = ["0.2.0.dev0", "0.2.0.dev1", "0.2.0rc1", "0.2.0rc10", "0.2.0"]
    assert ordered == sorted(ordered, key=Version)
    assert [versions.semantic(one) for one in ordered] == [
        "0.2.0-dev.0", "0.2.0-dev.1", "0.2.0-rc.1", "0.2.0-rc.10", "0.2.0",
    ]  # fmt: skip


def test_what_is_unreleased_gets_the_version_and_its_date(checkout: Path) -> None:
    file = checkout / changelog.FILE
    before = changelog.sections(checkout)[0]
    file.write_text(changelog.with_release(checkout, "0.2.0", "2026-12-01"))
    assert changelog.sections(checkout)[:2] == [
        changelog.Section(changelog.UNRELEASED, "", ""),
        changelog.Section("0.2.0", "2026-12-01", before.text),
    ]
    assert changelog.released(checkout)[0] == Version("0.2.0")
    with pytest.raises(ReleaseError, match="nothing is below"):
        changelog.with_release(checkout, "0.3.0", "2026-12-02")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# Changelog\n", r"its first section is not `## \[Unreleased\]`"),
        ("## [Unreleased]\n\n## 0.1.0\n", r"`## 0\.1\.0` is neither"),
        ("## [Unreleased]\n\n## [0.1.0]\n", r"`## \[0\.1\.0\]` is neither"),
        ("## [Unreleased] - 2026-12-01\n", "is neither"),
        ("## [Unreleased]\n\n### Operator\n", "`### Operator` below .* is none of Added, Changed"),
        ("## [Unreleased]\n\n## [0.1.0] - 2026-11-01\n\n## [0.2.0] - 2026-12-01\n", "not in order.*0.1.0, 0.2.0"),
        ("## [Unreleased]\n\n## [first] - 2026-11-01\n", "Invalid version: 'first'"),
    ],
)
def test_changelog_of_another_form_is_refused_by_its_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / changelog.FILE).write_text(text)
    with pytest.raises(ReleaseError, match=words):
        changelog.released(tmp_path)
