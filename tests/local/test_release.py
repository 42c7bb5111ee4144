"""A release: the same bytes from each build, wheels that work with what is locked, valid SBOMs, all or nothing."""

from __future__ import annotations

import filecmp
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from lanes.lanes import LANES

from release import build, environments, manifests, versions
from release.errors import ReleaseError
from support import ROOT
from support.release import VERSION, checkout, commit, git, with_version
from testcluster import programs

pytestmark = pytest.mark.timeout(400)  # a build takes twenty seconds on two free cores

WHEELS = ROOT.parent / "shared" / "wheels"  # the CPU build of torch, where it is at hand
TORCH = f"--find-links {WHEELS} torch==2.13.0+cpu" if WHEELS.is_dir() else "torch>=2.13,<2.14"
FILES = {
    f"{name.replace('-', '_')}-{VERSION}{end}"
    for name in versions.DISTRIBUTIONS
    for end in ("-py3-none-any.whl", ".tar.gz")
} | {f"everstep-{VERSION}.tgz"}


@pytest.fixture(scope="module")
def helm() -> Path:
    """Built before the tests by whoever sees that a test has this fixture."""
    return programs.helm()


@pytest.fixture(scope="module")
def repository(helm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkout(tmp_path_factory.mktemp("release") / "everstep")
    with_version(folder)
    (folder / manifests.INSTALL).write_text(manifests.install(folder / manifests.CHART))
    commit(folder)
    return folder


@pytest.fixture(scope="module")
def built(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels, source distributions and the chart's package."""
    out = tmp_path_factory.mktemp("built")
    sources = tmp_path_factory.mktemp("work") / "sources"
    build.export(repository, sources)
    build.build(sources, out, build.epoch(repository))
    return out


@pytest.mark.long
def test_build_of_a_commit_is_the_same_bytes_wherever_it_is_made(built: Path, repository: Path, tmp_path: Path) -> None:
    sources = tmp_path / "another folder"
    build.export(repository, sources)
    (tmp_path / "out").mkdir()
    newest = max(path.stat().st_mtime for path in built.iterdir())
    while int(time.time()) <= int(newest):  # a build that writes its own time then writes another second
        time.sleep(0.05)
    build.build(sources, tmp_path / "out", build.epoch(repository))
    same, different, errors = filecmp.cmpfiles(built, tmp_path / "out", sorted(FILES), shallow=False)
    assert (set(same), different, errors) == (FILES, [], [])


@pytest.mark.long
def test_times_in_a_wheel_are_that_of_the_commit(built: Path) -> None:
    assert {path.name for path in built.iterdir()} == FILES
    with zipfile.ZipFile(built / f"everstep-{VERSION}-py3-none-any.whl") as wheel:
        assert {entry.date_time for entry in wheel.infolist()} == {(2026, 12, 1, 12, 0, 0)}


@pytest.mark.long
def test_wheel_by_the_dockerfiles_command_is_the_one_that_is_released(
    repository: Path, built: Path, tmp_path: Path
) -> None:
    (command,) = re.findall(r"^RUN (pip wheel .*?) \$\{PIP_OPTIONS\}", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert command == "pip wheel --no-deps --no-build-isolation"
    arguments = (*command.split()[1:], "-q", "--no-index", "-w", str(tmp_path), str(repository / "sources"))
    environment = {**os.environ, "SOURCE_DATE_EPOCH": build.epoch(repository)}
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, env=environment)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.read_bytes() == (built / wheel.name).read_bytes()


def sboms(name: str, built: Path, folder: Path) -> dict[str, dict[str, Any]]:
    python = environments.check(name, VERSION, built, ROOT / "requirements", tuple(TORCH.split()), folder)
    texts = environments.sboms(name, VERSION, python, built, (ROOT / "Dockerfile").read_text(), "1764590400")
    return {file: json.loads(text) for file, text in texts.items()}


@pytest.mark.long
def test_operator_works_with_what_is_locked_and_its_sbom_has_no_more(built: Path, tmp_path: Path) -> None:
    documents = sboms("everstep-operator", built, tmp_path / "environment")
    assert set(documents) == {"everstep-operator.cdx.json", "image-operator.cdx.json"}
    locked = dict(re.findall(r"^([\w-]+)==([^ ]+)", (ROOT / "requirements/operator.txt").read_text(), re.MULTILINE))
    own, image = documents["everstep-operator.cdx.json"], documents["image-operator.cdx.json"]
    listed = {re.sub("[_.]", "-", one["name"]).lower(): one["version"] for one in own["components"]}
    assert listed.pop("everstep") == VERSION
    assert listed.items() <= locked.items()
    root = own["metadata"]["component"]
    assert (root["name"], root["version"], "purl" in root) == ("everstep-operator", VERSION, False)
    assert len(root["hashes"][0]["content"]) == 64
    assert "aiohttp" in listed
    assert not {"torch", "hatchling", "kubernetes"} & listed.keys()
    assert image["metadata"]["component"] == {
        "type": "container", "bom-ref": "everstep/operator", "name": "everstep/operator", "version": VERSION,
    }  # fmt: skip
    base = next(one for one in image["components"] if one["bom-ref"] == "base")
    assert (
        f"{base['name']}:{base['version']}@sha256:{base['hashes'][0]['content']}" in (ROOT / "Dockerfile").read_text()
    )
    assert {one["name"] for one in image["components"]} == {
        *(one["name"] for one in own["components"]),
        "python",
        root["name"],
    }
    assert str(tmp_path) not in json.dumps(documents)


def test_image_whose_base_is_a_tag_that_moves_is_refused() -> None:
    with pytest.raises(ReleaseError, match="`ARG BASE=` has no NAME:TAG@sha256:DIGEST"):
        environments._of_image({"components": []}, "everstep/worker", VERSION, "ARG BASE=python:3.11-slim\n")


@pytest.mark.long
def test_locked_packages_have_wheels_for_both_architectures(tmp_path: Path) -> None:
    environments.check_architectures(ROOT / "requirements", tmp_path)
    (tmp_path / "sdist.txt").write_text(
        # It has never had a wheel.
        "pyspark==3.5.1 --hash=sha256:dd6569e547365eadc4f887bf57f153e4d582a68c4b490de475d55b9981664910\n"
    )
    with pytest.raises(ReleaseError, match=r"pyspark==3\.5\.1 has no usable wheels"):
        environments.check_architectures(tmp_path, tmp_path)


def release(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As `make release` starts it, with the code of `repository`."""
    command = (sys.executable, "-m", "release", VERSION, f"--torch={TORCH}", *arguments)
    environment = {**os.environ, "PYTHONPATH": str(repository / "tools")}
    return subprocess.run(
        command, check=False, cwd=repository, capture_output=True, text=True, timeout=900, env=environment
    )


@pytest.mark.long
def test_release_that_fails_late_leaves_nothing(helm: Path, tmp_path: Path) -> None:
    """The lock of what builds the wheels has no hash of it: found after all that is checked first."""
    folder = checkout(tmp_path / "everstep")
    with_version(folder)
    (folder / manifests.INSTALL).write_text(manifests.install(folder / manifests.CHART))
    lock = folder / "requirements/build.txt"
    lock.write_text(re.sub(r"(hash=sha256:)\w{8}", r"\g<1>00000000", lock.read_text()))
    commit(folder)
    ended = release(folder, "--without-results")
    assert (ended.returncode, "Hash mismatch" in ended.stderr) == (1, True), ended.stderr
    assert not (folder / "dist").exists()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_release_of_a_tested_commit_is_whole_and_refused_a_second_time(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    tests = [{"test": f"tests/{lane}.py::t", "lane": lane, "outcome": "passed", "commit": head[:12]} for lane in LANES]
    (repository / "results.json").write_text(json.dumps(tests))
    ended = release(repository)
    assert ended.returncode == 0, ended.stderr
    folder = repository / "dist" / VERSION
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == FILES | {
        *("SHA256SUMS", "RELEASE_NOTES.md", "results.json", "manifests/crd.yaml", "manifests/install.yaml"),
        *(f"requirements/{name}.txt" for name in ("build", "local", "operator", "worker")),
        *(f"sbom/{name}.cdx.json" for name in (*versions.DISTRIBUTIONS, "image-operator", "image-worker")),
    }
    sums = subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], check=False, cwd=folder)
    assert sums.returncode == 0
    assert len((folder / "SHA256SUMS").read_text().splitlines()) == len(files) - 1
    assert f"`make nightly` on this commit: {len(LANES)} passed" in (folder / "RELEASE_NOTES.md").read_text()
    from cyclonedx.schema import SchemaVersion  # noqa: PLC0415 - two seconds, for grammars of other formats
    from cyclonedx.validation.json import JsonStrictValidator  # noqa: PLC0415 - the same

    smallest = min((folder / "sbom").iterdir(), key=lambda path: path.stat().st_size)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(smallest.read_text()) is None
    worker = json.loads((folder / "sbom/image-worker.cdx.json").read_text())
    assert {"torch", "numpy", "s3fs", "everstep"} <= {one["name"] for one in worker["components"]}
    assert (
        release(repository).stderr
        == f"make release: dist/{VERSION} is there already: remove it to make the release again\n"
    )
