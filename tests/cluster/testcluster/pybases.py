"""Base images with the project's dependencies inside: the project's own images are then a thin layer.

A torch image is over a gigabyte; carried to three nodes it takes two minutes. So the dependencies are a layer of their
own, which changes only with the requirements, and which `nodeimage.py` gives to the nodes beforehand.
"""

import os
import re
import tomllib
from pathlib import Path

from testcluster import cache, docker, rootfs, versions
from testcluster.proc import ClusterError, run

PATH_ENV = "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
# Wheels for the machine that has a mirror of its own, for example the CPU build of torch.
WHEELS = Path(os.environ.get("WHEELS") or cache.CHECKOUT.parent / "shared" / "wheels")
# So that the project installs with --no-build-isolation, without network: what requirements/build.txt names.
BUILD_BACKEND = ("hatchling==1.33.0", "editables")
PULL_LIMIT = 600.0


def python() -> str:
    """The tag of `python:3.11-slim`, or of its stand-in where it cannot be pulled."""
    if docker.exists(versions.PYTHON_IMAGE):
        return versions.PYTHON_IMAGE
    if docker.registry_answers():
        run("docker", "pull", "-q", versions.PYTHON_IMAGE, timeout=PULL_LIMIT)
        return versions.PYTHON_IMAGE
    root = rootfs.python()
    return docker.image(
        "python",
        (root.parent.name, PATH_ENV),
        lambda tag: docker.import_tar(root, tag, f"ENV {PATH_ENV}", 'CMD ["python3"]'),
    )


def _requirements(distribution: str, *extras: str) -> list[str]:
    """What the distribution in that folder needs besides the project's other distributions."""
    project = tomllib.loads((cache.CHECKOUT / distribution / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for e in extras for line in project["optional-dependencies"][e])]
    return sorted({line for line in lines if not line.startswith("everstep")})


def _of_stage(name: str) -> list[str]:
    """The requirements that this stage of the Dockerfile installs: its build in the cluster has no network."""
    stage = (cache.CHECKOUT / "Dockerfile").read_text().partition(f" AS {name}\n")[2].partition("\nFROM ")[0]
    found = re.findall(r"'([\w.-]+>=[\w.]+)'", stage)
    if not found:
        raise ClusterError(f"Dockerfile: the stage `{name}` names no requirement, as 'name>=version'")
    return found


def _local_wheels() -> list[str]:
    """`name==version` of each wheel at hand: exact, so that pip takes it and not a newer one of another kind."""
    return sorted("==".join(path.name.split("-")[:2]) for path in WHEELS.glob("*.whl")) if WHEELS.is_dir() else []


def _installed(base: str, name: str, requirements: list[str], wheels: list[str], *settings_of_builds: str) -> str:
    """An image of `base` with `requirements`; done in a container, so that no wheel stays in a layer."""

    def make(tag: str) -> None:
        mounts, settings = [], [part for setting in settings_of_builds for part in ("-e", setting)]
        if CERTIFICATES.exists():  # the machine may trust a certificate authority that the image does not know
            mounts += ["-v", f"{CERTIFICATES}:/run/ca.crt:ro"]
            settings += ["-e", "PIP_CERT=/run/ca.crt"]
        for variable in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_DEFAULT_TIMEOUT", "HTTPS_PROXY", "https_proxy"):
            if variable in os.environ:
                settings += ["-e", variable]
        options = ["--no-cache-dir", "--disable-pip-version-check", "--root-user-action=ignore"]
        if wheels:
            mounts += ["-v", f"{WHEELS}:/run/wheels:ro"]
            options += ["--find-links", "/run/wheels"]
        container = f"everstep-test-{name}-{os.getpid()}"
        try:
            run(
                "docker", "run", "--name", container, "--network=host", *mounts, *settings, base,
                "python3", "-m", "pip", "install", *options, *requirements, *wheels,
                log=cache.logs() / f"pip-{name}.log",
            )  # fmt: skip
            run("docker", "commit", "--change", "ENTRYPOINT []", "--change", 'CMD ["python3"]', container, tag)
        finally:
            run("docker", "rm", "-f", container)

    return docker.image(name, (base, *requirements, *wheels), make)


def operator() -> str:
    """The tag of the base with the operator's dependencies."""
    return _installed(
        python(), "operator-base", [*_requirements("worker"), *_requirements("operator", "otel"), *BUILD_BACKEND], []
    )


def worker() -> str:
    """The tag of the base with torch, the worker's dependencies and what the examples import."""
    needed = [*_requirements("worker", "worker", "s3"), *BUILD_BACKEND, *_of_stage("examples")]
    return _installed(python(), "worker-base", needed, _local_wheels())


def deepspeed() -> str:
    """The tag of the worker's base with DeepSpeed."""
    return _installed(worker(), "deepspeed-base", _of_stage("deepspeed"), [], "DS_BUILD_OPS=0")
