"""The distributions: what is in their wheels, and that each works where the others are not installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import everstep
from everstep.installing import remedy

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT.parent / "shared" / "wheels"  # the CPU build of torch, where it is at hand
FOLDERS = {
    "everstep": "worker",
    "everstep-operator": "operator",
    "everstep-local": "local",
    "everstep-horovod": "horovod",
    "everstep-sources": "sources",
}
UV = Path(sys.executable).with_name("uv")
REFUSED = "Cannot connect to host 127.0.0.1:1"
LOCAL_IS_MISSING = f"{remedy('everstep-local')}\n"


def call(*command: str | Path, timeout: float = 60, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EVERSTEP_")} | settings
    return subprocess.run(
        [str(c) for c in command], check=False, capture_output=True, text=True, timeout=timeout, env=environment
    )


def done(*command: str | Path, timeout: float = 60) -> str:
    ended = call(*command, timeout=timeout)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Built as an image builds them: from the folder, with the build backend that is installed here."""
    folder = tmp_path_factory.mktemp("wheels")
    build = (UV, "build", "-q", "--offline", "--wheel", "--no-build-isolation", "--python", sys.executable)
    for source in FOLDERS.values():
        done(*build, "-o", folder, ROOT / source)
    return {name: next(folder.glob(f"{name.replace('-', '_')}-*.whl")) for name in FOLDERS}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [n for n in opened.namelist() if n.endswith(".dist-info/METADATA")]
        return Parser().parsestr(opened.read(name).decode())


@pytest.mark.parametrize("name", FOLDERS)
def test_wheel_has_its_own_package_alone_with_types_and_license(name: str, wheels: dict[str, Path]) -> None:
    package = name.replace("-", "_")
    with zipfile.ZipFile(wheels[name]) as opened:
        names = opened.namelist()
        info = f"{package}-{everstep.__version__}.dist-info"
        assert {n.split("/")[0] for n in names} == {package, info}
        assert opened.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert f"{package}/py.typed" in names
    assert not [n for n in names if "__pycache__" in n]


@pytest.mark.parametrize("name", FOLDERS)
def test_version_is_in_one_place_and_needs_the_others_of_the_same(name: str, wheels: dict[str, Path]) -> None:
    told = metadata(wheels[name])
    assert (told["Name"], told["Version"]) == (name, everstep.__version__)
    assert told["License-Expression"] == "Apache-2.0"
    ours = [r for r in told.get_all("Requires-Dist", []) if r.startswith("everstep")]
    needed = {
        "everstep": [], "everstep-operator": ["everstep"], "everstep-local": ["everstep-operator[kubeconfig]"],
        "everstep-horovod": ["everstep[worker]"], "everstep-sources": ["everstep"],
    }[name]  # fmt: skip
    assert ours == [f"{n}=={everstep.__version__}" for n in needed]


@pytest.fixture
def unpacked(wheels: dict[str, Path], tmp_path: Path) -> Path:
    """What an image of the operator has of this project."""
    for name in ("everstep", "everstep-operator"):
        zipfile.ZipFile(wheels[name]).extractall(tmp_path)
    return tmp_path


def without_checkout(unpacked: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python without `site`, so that no editable installation counts; other packages are found as ever."""
    path = os.pathsep.join((str(unpacked), sysconfig.get_path("purelib")))
    return call(sys.executable, "-S", *arguments, PYTHONPATH=path)


@pytest.mark.long
def test_operator_starts_from_its_own_wheel_and_the_librarys(unpacked: Path) -> None:
    told = without_checkout(unpacked, "-m", "everstep_operator.main", "--version")
    assert (told.returncode, told.stdout) == (0, f"everstep-operator {everstep.__version__}\n"), told.stderr
    ran = without_checkout(unpacked, "-m", "everstep.cli.main", "run", "job.yaml")
    assert (ran.returncode, ran.stderr[-len(LOCAL_IS_MISSING) :]) == (2, LOCAL_IS_MISSING)
    assert "Traceback" not in ran.stderr


def test_horovods_interface_runs_from_its_own_wheel_and_the_librarys(wheels: dict[str, Path], tmp_path: Path) -> None:
    for name in ("everstep", "everstep-horovod"):
        zipfile.ZipFile(wheels[name]).extractall(tmp_path / "wheels")
    script = tmp_path / "train.py"
    script.write_text("import horovod.torch as hvd\nprint(hvd.__name__, hvd.__file__)")
    ran = without_checkout(tmp_path / "wheels", "-m", "everstep_horovod", str(script))
    assert ran.stdout == f"everstep_horovod.torch {tmp_path}/wheels/everstep_horovod/torch/__init__.py\n", ran.stderr


@pytest.mark.long
def test_samples_of_a_tar_file_are_counted_from_the_wheels_alone(wheels: dict[str, Path], tmp_path: Path) -> None:
    for name in ("everstep", "everstep-sources"):
        zipfile.ZipFile(wheels[name]).extractall(tmp_path / "wheels")
    (tmp_path / "0.txt").write_text("one sample")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "0.txt", "0.txt")
    code = f"from everstep_sources import tar, tar_counts; print(tar.__file__, tar_counts('{tmp_path}/a.tar'))"
    ran = without_checkout(tmp_path / "wheels", "-c", code)
    expected = f"{tmp_path}/wheels/everstep_sources/tar.py {{'{tmp_path}/a.tar': {{'samples': 1, "
    assert ran.stdout.startswith(expected), ran.stderr


def test_launcher_without_horovods_interface_names_its_package(unpacked: Path) -> None:
    ran = without_checkout(unpacked, "-m", "everstep.agent.main", "-m", "everstep_horovod", "train.py")
    assert ran.returncode == 1
    assert f"No module named 'everstep_horovod': {remedy('everstep-horovod')}" in ran.stderr


def test_library_without_torch_names_the_extra(unpacked: Path) -> None:
    code = "import sys, everstep\nsys.modules['torch'] = None\ntry: everstep.start\nexcept ImportError as e: print(e)"
    told = without_checkout(unpacked, "-c", code)
    assert told.stdout == "everstep.start needs torch, which is not installed: pip install 'everstep[worker]'\n"


# --- what the images install


LOCKS = {"operator": ("worker", "operator"), "worker": ("worker",), "local": ("worker", "operator", "local")}
EXTRAS = {"operator": (), "worker": ("worker", "s3"), "local": ("kubeconfig",)}
DISTRIBUTIONS = sorted(path.parent.name for path in ROOT.glob("*/pyproject.toml"))


def locked(name: str) -> dict[str, str]:
    """Packages and versions for the Python that runs here; each line must have a hash."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    assert "://" not in text
    entries = [e for e in re.split(r"^(?=\w)", re.sub(r"^#.*\n", "", text, flags=re.M), flags=re.M) if e]
    assert all("--hash=sha256:" in e for e in entries)
    lines = [Requirement(e.splitlines()[0].rstrip("\\ ")) for e in entries]
    return {r.name: str(r.specifier)[2:] for r in lines if r.marker is None or r.marker.evaluate()}


def test_image_begins_with_one_base_and_not_with_a_tag_that_moves() -> None:
    bases = re.findall(r"^ARG BASE=(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert [re.sub("[0-9a-f]{64}$", "", base) for base in bases] == ["python:3.11.15-slim-bookworm@sha256:"]


@pytest.mark.parametrize("name", LOCKS)
def test_lock_has_what_the_distributions_ask_for(name: str) -> None:
    versions, wrong = locked(name), []
    for folder in LOCKS[name]:
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {})
        for line in [*project["dependencies"], *(one for extra in EXTRAS[name] for one in extras.get(extra, ()))]:
            asked = Requirement(line)
            if (
                not asked.name.startswith("everstep")
                and asked.name != "torch"
                and versions.get(asked.name, "0") not in asked.specifier
            ):
                wrong.append(line)
    assert not wrong, "run `make lock`: a pyproject.toml is newer"
    assert not {"torch", *FOLDERS} & set(versions)


# --- each in an environment of its own, from the package index


def installed(folder: Path, wheels: dict[str, Path], *requirements: str) -> Path:
    """The programs of a new environment with these requirements."""
    done(UV, "venv", "-q", "--python", sys.executable, folder)
    links = [
        part for place in (wheels["everstep"].parent, WHEELS) if place.is_dir() for part in ("--find-links", place)
    ]
    install = (UV, "pip", "install", "-q", "--prerelease=if-necessary-or-explicit", "--python", folder / "bin/python")
    done(*install, *links, *requirements, timeout=600)
    return folder / "bin"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_library_alone_looks_at_checkpoints_and_says_what_it_lacks(wheels: dict[str, Path], tmp_path: Path) -> None:
    programs = installed(tmp_path / "venv", wheels, str(wheels["everstep"]))
    (tmp_path / "x.py").write_text("print('never')")
    assert done(programs / "everstep", "--version") == f"everstep {everstep.__version__}\n"
    assert "verify" in done(programs / "everstep", "ckpt", "--help")
    for arguments, code, told in (
        (("everstep", "ckpt", "ls", "s3://bucket/run"), 3, "pip install 'everstep[s3]'"),
        (("everstep", "ckpt", "ls", "gs://bucket/run"), 3, "pip install 'everstep[gcs]'"),
        (("everstep", "ckpt", "ls", "az://bucket/run"), 3, "pip install 'everstep[azure]'"),
        (("everstep", "ckpt", "export", str(tmp_path), "out"), 3, "pip install 'everstep[worker]'"),
        (("everstep", "run", "job.yaml"), 2, LOCAL_IS_MISSING),
        (("everstep", "plan", "job"), 2, LOCAL_IS_MISSING),
        (("everstep-run", str(tmp_path / "x.py")), 2, "pip install 'everstep[worker]'"),
    ):
        ended = call(programs / arguments[0], *arguments[1:])
        assert (ended.returncode, told in ended.stderr) == (code, True), (arguments, ended.stderr)
        assert len(ended.stderr.splitlines()) == 1, (arguments, ended.stderr)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_operator_alone_starts_and_has_no_local_mode(wheels: dict[str, Path], tmp_path: Path) -> None:
    programs = installed(tmp_path / "venv", wheels, str(wheels["everstep"]), str(wheels["everstep-operator"]))
    assert done(programs / "everstep-operator", "--version") == f"everstep-operator {everstep.__version__}\n"
    found = done(UV, "pip", "list", "--format", "freeze", "--python", programs / "python")
    assert not {"torch", "numpy", "cel-python", "everstep-local", "kubernetes"} & {
        line.split("==")[0] for line in found.split()
    }
    ended = call(programs / "everstep", "run", "job.yaml")
    assert (ended.returncode, ended.stderr.endswith(LOCAL_IS_MISSING)) == (2, True), ended.stderr
    ended = call(programs / "everstep-operator", "--kubeconfig", "kube.yaml", "--namespace", "n")
    assert (ended.returncode, "pip install 'everstep-operator[kubeconfig]'" in ended.stderr) == (2, True), ended.stderr
    assert REFUSED in log_in_pod(programs / "python", tmp_path)


def log_in_pod(python: Path, folder: Path) -> str:
    """What the operator logs as in a pod, until it cannot connect: no API server is at that address."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", folder / "ca.key")
    done("openssl", "req", "-x509", *key, "-subj", "/CN=ca", "-out", folder / "ca.crt")
    for name in ("token", "namespace"):
        (folder / name).write_text("one")
    environment = {k: v for k, v in os.environ.items() if k not in ("KUBECONFIG", "PYTHONPATH")}
    environment |= {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
    program: list[str | Path] = [python, "-P", ROOT / "tests/support/operator/in_pod.py", folder]
    with subprocess.Popen(
        [*program, "--port", "0", "--probe-port", "0"], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines: list[str] = []
        try:
            while not lines or (lines[-1] and REFUSED not in lines[-1]):
                lines.append(process.stderr.readline())
        finally:
            process.kill()
    return "".join(lines)


@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_what_builds_a_distribution_is_one_version_and_in_the_lock(folder: str) -> None:
    """A wheel is made by it, so a new version of it is another wheel."""
    needed = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["build-system"]["requires"]
    versions = locked("build")
    assert needed == [f"{name}=={versions[name]}" for name in (Requirement(line).name for line in needed)]


def test_images_install_the_projects_wheels_without_what_they_depend_on() -> None:
    """What a wheel asks for is installed from the lock, by its hash. Else pip takes what is newest, from anywhere."""
    lines = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
    commands = [part for line in lines if line.startswith("RUN") for part in re.split(r"&&|\|\|", line)]
    installs = [part for part in commands if re.search(r"pip (install|wheel)", part)]
    own = [part for part in installs if "/wheels/" in part or "/src/" in part]
    assert len(own) == 4
    assert all("--no-deps" in part for part in own)
    assert "--no-build-isolation" in next(part for part in own if "pip wheel" in part)
    files = [part for part in installs if "-r " in part]
    assert [re.search(r"-r /requirements/(\w+)\.txt", part)[1] for part in files] == ["build", "operator", "worker"]  # type: ignore[index]
    assert all("--require-hashes" in part for part in files)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["operator", "worker"])
def test_image_is_whole_with_the_locked_versions(name: str, wheels: dict[str, Path], tmp_path: Path) -> None:
    """The lines of the Dockerfile, with pip as there."""
    done(sys.executable, "-m", "venv", tmp_path / "venv")
    pip = (tmp_path / "venv/bin/python", "-m", "pip", "--disable-pip-version-check")
    done(*pip, "install", "-q", "--require-hashes", "-r", ROOT / "requirements" / f"{name}.txt", timeout=600)
    torch = [f"torch=={wheel.name.split('-')[1]}" for wheel in WHEELS.glob("torch-*.whl")]
    more = {
        "operator": [wheels["everstep"], wheels["everstep-operator"]],
        "worker": [f"{wheels['everstep']}[worker,s3]", *torch],
    }[name]
    done(*pip, "install", "-q", "--find-links", WHEELS, *more, timeout=600)
    assert done(*pip, "check") == "No broken requirements found.\n"
    found = dict(line.split("==") for line in done(*pip, "freeze").split() if "==" in line)
    names = {re.sub(r"[-_.]+", "-", n).lower(): v for n, v in found.items()}
    assert {n: v for n, v in locked(name).items() if names.get(n, v) != v} == {}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_local_alone_runs_a_job_that_needs_no_torch(wheels: dict[str, Path], tmp_path: Path) -> None:
    needed = ("everstep", "everstep-operator", "everstep-local")
    programs = installed(tmp_path / "venv", wheels, *(str(wheels[name]) for name in needed))
    job = tmp_path / "job.yaml"
    job.write_text(
        "apiVersion: everstep.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: job}\nspec:\n  replicas: 1\n"
        "  template: {spec: {containers: [{name: worker, image: x, command: [python, -c, 'print(\"trained\")']}]}}\n"
    )
    ended = call(programs / "everstep", "run", job, "--plain", "--out", tmp_path / "out", timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (tmp_path / "x.py").write_text("print('never')")
    ended = call(programs / "everstep", "run", tmp_path / "x.py")
    assert (ended.returncode, "pip install 'everstep[worker]'" in ended.stderr) == (2, True), ended.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
def test_library_with_torch_starts_a_script(wheels: dict[str, Path], tmp_path: Path) -> None:
    torch = [f"torch=={wheel.name.split('-')[1]}" for wheel in WHEELS.glob("torch-*.whl")]
    programs = installed(tmp_path / "venv", wheels, f"{wheels['everstep']}[worker]", *torch)
    (tmp_path / "x.py").write_text("import everstep\nprint(everstep.start.__module__)")
    assert done(programs / "everstep-run", tmp_path / "x.py", timeout=240) == "everstep.train.session\n"
