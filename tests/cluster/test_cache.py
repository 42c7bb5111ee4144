"""A step of the test cluster runs again when what it is made of changed, and only then."""

from pathlib import Path

import pytest

from testcluster import cache


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_CACHE", str(tmp_path / "cache"))


def write(folder: Path) -> None:
    (folder / "result").write_text("made")


def test_same_parts_again_make_nothing(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        write(folder)

    first = cache.artifact("step", ("1.0",), make)
    assert cache.artifact("step", ("1.0",), make) == first
    assert (first / "result").read_text() == "made"
    assert len(made) == 1


def test_changed_source_file_makes_another_result(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "main.go").write_text("one")
    first = cache.artifact("step", (source,), write)
    (source / "main.go").write_text("two")
    assert cache.artifact("step", (source,), write) != first


def test_file_made_executable_or_renamed_changes_the_key(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("x")
    plain = cache.key_of(tmp_path)
    file.chmod(0o755)
    executable = cache.key_of(tmp_path)
    file.rename(tmp_path / "b")
    assert len({plain, executable, cache.key_of(tmp_path)}) == 3


def test_parts_joined_differently_have_different_keys() -> None:
    assert cache.key_of("ab", "c") != cache.key_of("a", "bc")


def test_step_that_failed_leaves_no_result_and_runs_again() -> None:
    def fail(folder: Path) -> None:
        write(folder)
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        cache.artifact("step", ("1.0",), fail)
    assert (cache.artifact("step", ("1.0",), write) / "result").read_text() == "made"


def test_many_versions_made_keep_only_the_newest() -> None:
    results = [cache.artifact("step", (str(version),), write) for version in range(6)]
    assert results[-1].is_dir()
    assert sum(result.is_dir() for result in results) == cache.KEPT_VERSIONS
