"""What forbids a release: each is refused before anything is built, with one error that says what to do."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from release import bump, changelog, crd, results
from release.__main__ import Checked, check, notes, sums, whole
from release.errors import ReleaseError
from support.release import CHECKED, VERSION, checkout, commit, git, with_version

LANES = ("unit", "servers")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = checkout(tmp_path, CHECKED)
    with_version(folder)
    return folder


def refused(repository: Path, version: str = VERSION, without_results: bool = True) -> str:
    before = git(repository, "status", "--porcelain", "--ignored")
    with pytest.raises(ReleaseError) as e:
        check(repository, version, without_results)
    assert git(repository, "status", "--porcelain", "--ignored") == before
    return str(e.value)


@pytest.mark.parametrize("version", ["", "v9.8.7", "9.8", "9.8.7.dev0"])
def test_version_of_a_wrong_form_is_refused(repository: Path, version: str) -> None:
    assert refused(repository, version) == f"VERSION={version} has another form than 0.2.0 or 0.2.0rc1"


def test_version_that_the_checkout_has_not_is_refused_with_the_way_there(repository: Path) -> None:
    words = refused(repository, "9.9.0")
    assert words.startswith("the checkout has the version 9.8.7: run `make version VERSION=9.9.0`, commit, and let")


def test_distribution_with_another_version_is_refused(repository: Path) -> None:
    file = repository / "local/pyproject.toml"
    file.write_text(file.read_text().replace(VERSION, "9.8.6"))
    commit(repository)
    assert refused(repository).startswith("local/pyproject.toml has 9.8.6, and not 9.8.7")


def test_version_without_its_changes_is_refused(repository: Path) -> None:
    file = repository / changelog.FILE
    file.write_text(file.read_text().replace(f"## [{VERSION}]", "## [9.8.6]"))
    commit(repository)
    assert refused(repository).startswith("CHANGELOG.md has no section `## [9.8.7] - YYYY-MM-DD` with changes")


def test_version_older_than_one_of_the_changelog_is_refused(repository: Path) -> None:
    file = repository / changelog.FILE
    file.write_text(file.read_text().replace(f"## [{VERSION}]", f"## [9.9.0] - 2027-01-01\n\n## [{VERSION}]"))
    commit(repository)
    assert refused(repository) == "VERSION=9.8.7 is not newer than 9.9.0, which CHANGELOG.md has"


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ("v9.10.0", "VERSION=9.8.7 is not newer than the tag v9.10.0"),
        ("v9.8.7", "the tag v9.8.7 is at another commit: a version is released once"),
        ("9.8.7", "the tag 9.8.7 is at another commit: a version is released once"),
    ],
)
def test_version_that_a_tag_has_already_is_refused(repository: Path, tag: str, words: str) -> None:
    git(repository, "tag", "-a", tag, "-m", "one")
    git(repository, "tag", "nightly-2026-11-30")
    commit(repository)
    assert refused(repository) == words


def new_file(repository: Path) -> None:
    (repository / "new.py").touch()


def staged(repository: Path) -> None:
    new_file(repository)
    git(repository, "add", "new.py")


@pytest.mark.parametrize("make_dirty", [new_file, staged])
def test_dirty_tree_is_refused_by_its_file(repository: Path, make_dirty: Callable[[Path], None]) -> None:
    make_dirty(repository)
    assert re.match(r"the tree is dirty: (A  |\?\? )new\.py\. Commit it", refused(repository))


def test_release_that_is_there_already_is_refused(repository: Path) -> None:
    (repository / "dist" / VERSION).mkdir(parents=True)
    (repository / "dist" / VERSION / "file").touch()
    assert refused(repository) == "dist/9.8.7 is there already: remove it to make the release again"


def test_crd_that_breaks_the_last_release_is_refused(repository: Path) -> None:
    file = repository / crd.CURRENT
    last = repository / crd.RELEASED / "9.8.0.yaml"
    last.parent.mkdir()
    last.write_text(file.read_text())
    file.write_text(re.sub(r"^( +)suspend:$", r"\1suspended:", file.read_text(), flags=re.MULTILINE))
    commit(repository)
    assert "v1alpha1.spec.suspend was removed" in refused(repository)


def entry(**changed: str) -> dict[str, str]:
    return {"test": "tests/a.py::test", "lane": "unit", "outcome": "passed", "commit": "0123456789ab", **changed}


COMMIT = "0123456789abcdef0123456789abcdef01234567"
GOOD = [entry(), entry(lane="servers", outcome="skipped"), entry(outcome="passed alone")]


def write(folder: Path, text: str) -> Path:
    (folder / results.FILE).write_text(text)
    return folder / results.FILE


def test_results_of_the_whole_run_on_the_commit_are_counted(tmp_path: Path) -> None:
    counted = results.counts(write(tmp_path, json.dumps(GOOD)), COMMIT, LANES)
    assert counted == {"passed": 1, "passed alone": 1, "skipped": 1}
    section = changelog.Section("0.2.0", "2026-12-01", "### Added\n- All.")
    text = notes("0.2.0", Checked(COMMIT, section, counted))
    assert "`make nightly` on this commit: 1 passed, 1 passed alone, 1 skipped (results.json)." in text
    assert text.startswith(f"# Everstep 0.2.0, 2026-12-01\n\nCommit {COMMIT}. ")
    assert text.endswith("### Added\n- All.\n")


def test_release_without_results_says_so_in_its_notes() -> None:
    checked = Checked(COMMIT, changelog.Section("0.2.0", "2026-12-01", "- All."), Counter())
    assert "**The whole test suite was not run on this commit**" in notes("0.2.0", checked)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "results.json is missing: run `make nightly`, or release without with WITHOUT_RESULTS=1"),
        ("[{", "results.json cannot be read: "),
        ("[]", "results.json is no list of tests with commit, lane, outcome, test: "),
        ("{}", "results.json is no list of tests"),
        (
            json.dumps([{"test": "a", "outcome": "passed", "commit": "0123456789ab"}]),
            "results.json is no list of tests",
        ),
        (json.dumps([*GOOD, entry(outcome="failed")]), "results.json: tests/a.py::test failed. run `make nightly`"),
        (json.dumps([*GOOD, *2 * [entry(outcome="did not run")]]), "tests/a.py::test did not run, and 1 more"),
        (json.dumps([*GOOD, entry(outcome="other")]), "results.json: tests/a.py::test other"),
        (json.dumps(GOOD[:1]), "results.json has no test of the lanes servers: `make nightly` goes on there"),
        (
            json.dumps([entry(commit="0123456789ab-dirty")]),
            "is of the commit 0123456789ab-dirty, and 0123",
        ),
        (json.dumps([entry(commit="ba9876543210")]), "results.json is of the commit ba9876543210, and 0123456789ab is"),
        (json.dumps([entry(commit="")]), "results.json is of the commit , and"),
    ],
)
def test_results_that_do_not_show_that_the_commit_is_tested_are_refused(
    text: str | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / results.FILE if text is None else write(tmp_path, text)
    with pytest.raises(ReleaseError) as e:
        results.counts(path, COMMIT, LANES)
    assert words in str(e.value)


def test_release_asks_for_the_results_before_it_builds(repository: Path) -> None:
    assert refused(repository, without_results=False).startswith("results.json is missing")


def fails_late(target: Path) -> None:
    with whole(target) as out:
        (out / "one").touch()
        (out / "none").read_text()


def test_files_appear_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "dist" / "0.2.0"
    with pytest.raises(FileNotFoundError):
        fails_late(target)
    assert list(tmp_path.iterdir()) == []
    with whole(target) as out:
        (out / "one").write_text("1")
        assert not target.exists()
    made = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")]
    assert made == ["dist", "dist/0.2.0", "dist/0.2.0/one"]


def test_sums_are_those_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("b/c", "a"):
        (tmp_path / name).write_text(name)
    text = sums(tmp_path)
    (tmp_path / "SHA256SUMS").write_text(text)
    command = ("sha256sum", "-c", "--strict", "SHA256SUMS")
    checked = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, "a: OK\nb/c: OK\n"), checked.stderr


# --- make version


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("9.8.7", "VERSION=9.8.7 is not newer than 9.8.7"),
        ("9.8.7rc1", "VERSION=9.8.7rc1 is not newer than 9.8.7"),
        ("9.8.8-rc.1", "VERSION=9.8.8-rc.1 has another form than 0.2.0 or 0.2.0rc1 or 0.2.0.dev0"),
        ("9.8.8", "CHANGELOG.md: nothing is below `## [Unreleased]`, so there is nothing to release"),
    ],
)
def test_version_that_cannot_follow_is_refused_and_changes_nothing(repository: Path, version: str, words: str) -> None:
    with pytest.raises(ReleaseError) as e:
        bump.bump(repository, version, "2026-12-02")
    assert str(e.value) == words
    assert git(repository, "status", "--porcelain") == ""


def test_new_version_of_a_dirty_tree_is_refused(repository: Path) -> None:
    new_file(repository)
    with pytest.raises(ReleaseError, match=r"the tree is dirty: \?\? new\.py"):
        bump.bump(repository, "9.9.0.dev0", "2026-12-02")
