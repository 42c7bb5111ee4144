"""Each wheel in an empty environment of the locked versions, and the SBOM of what is there.

What is installed is what the images install: the lock with its hashes, PyTorch where it is needed, then the wheels
without what they ask for. `uv pip check` says whether that was locked.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from release.commands import CYCLONEDX, UV, run
from release.errors import ReleaseError
from release.versions import DISTRIBUTIONS

Document = dict[str, Any]
BASE = re.compile(r"^ARG BASE=(?P<name>\w+):(?P<tag>[\w.-]+)@sha256:(?P<digest>[0-9a-f]{64})$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Environment:
    """`lock` is a file of requirements/, `wheels` are the distributions in it, `code` has to run there.

    `image` is the target of the Dockerfile that installs the same.
    """

    lock: str
    wheels: tuple[str, ...]
    code: str
    torch: bool = False
    image: str = ""


# By the distribution that it is for. Horovod's interface and the sources are added to what a worker's image has.
ENVIRONMENTS = {
    "everstep": Environment("worker", ("everstep",), "import everstep; everstep.start", torch=True, image="worker"),
    "everstep-operator": Environment(
        "operator", ("everstep", "everstep-operator"), "import everstep_operator.main", image="operator"
    ),
    "everstep-local": Environment(
        "local", ("everstep", "everstep-operator", "everstep-local"), "import everstep_local.commands"
    ),
    "everstep-horovod": Environment(
        "worker", ("everstep", "everstep-horovod"), "import everstep_horovod.torch", torch=True
    ),
    "everstep-sources": Environment("worker", ("everstep", "everstep-sources"), "import everstep_sources", torch=True),
}
# Images are of these. Nothing is emulated: what is known is whether each locked package has a wheel with a locked hash.
ARCHITECTURES = {"amd64": "x86_64-manylinux_2_36", "arm64": "aarch64-manylinux_2_36"}
IMAGE_PYTHON = "3.11"


def check_architectures(requirements: Path, work: Path) -> None:
    """Raises `ReleaseError` where a locked package has no wheel for one of `ARCHITECTURES`."""
    for platform in ARCHITECTURES.values():
        for lock in sorted(requirements.glob("*.txt")):
            run(
                UV, "pip", "install", "-q", "--dry-run", "--target", work / "none", "--python-platform", platform,
                "--python-version", IMAGE_PYTHON, "--only-binary", ":all:", "--require-hashes", "-r", lock,
            )  # fmt: skip


def check(name: str, version: str, wheels: Path, requirements: Path, torch: tuple[str, ...], folder: Path) -> Path:
    """Install a distribution into `folder`, import it, and return its Python.

    `torch` are arguments of `pip install`. Raises `ReleaseError` if something is not locked or cannot be imported.
    """
    environment = ENVIRONMENTS[name]
    python = folder / "bin/python"
    run(UV, "venv", "-q", "--python", sys.executable, folder)
    install = (UV, "pip", "install", "-q", "--python", python)
    run(*install, "--require-hashes", "-r", requirements / f"{environment.lock}.txt")
    if environment.torch:
        run(*install, *torch)
    own = [f"{one}=={version}" for one in environment.wheels]
    run(*install, "--no-deps", "--no-index", "--find-links", wheels, *own)
    run(UV, "pip", "check", "-q", "--python", python)
    run(python, "-I", "-c", environment.code)
    return python


def sboms(name: str, version: str, python: Path, wheels: Path, dockerfile: str, time: str) -> dict[str, str]:
    """CycloneDX documents by file name: of the distribution, and of the image that installs the same.

    Raises `ReleaseError` where one is not valid.
    """
    told = run(
        CYCLONEDX,
        "environment",
        "--no-validate",
        "--output-reproducible",
        "--of",
        "JSON",
        python,
        SOURCE_DATE_EPOCH=time,
    )
    found: Document = json.loads(told)
    for component in found["components"]:
        if component["name"] in DISTRIBUTIONS:
            component.pop("purl", None)  # it would say that it is from the package index
            wheel = next(wheels.glob(f"{component['name'].replace('-', '_')}-{version}-*.whl"))
            component["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    documents = {f"{name}.cdx.json": _of_distribution(found, name)}
    image = ENVIRONMENTS[name].image
    if image:
        documents[f"image-{image}.cdx.json"] = _of_image(found, f"everstep/{image}", version, dockerfile)
    return {file: _text(file, document) for file, document in documents.items()}


def _of_distribution(found: Document, name: str) -> Document:
    (own,) = [one for one in found["components"] if one["name"] == name]
    others = [one for one in found["components"] if one is not own]
    return {**found, "metadata": {**found["metadata"], "component": own}, "components": others}


def _of_image(found: Document, name: str, version: str, dockerfile: str) -> Document:
    """The layers that the Dockerfile adds. What is in the base is known to who builds it, by its digest."""
    base = BASE.search(dockerfile)
    if base is None:
        raise ReleaseError("Dockerfile: `ARG BASE=` has no NAME:TAG@sha256:DIGEST, so its image is not one for ever")
    image = {"type": "container", "bom-ref": name, "name": name, "version": version}
    below = {
        "type": "container", "bom-ref": "base", "name": base["name"], "version": base["tag"],
        "hashes": [{"alg": "SHA-256", "content": base["digest"]}],
        "description": "The base of the image. What it holds is not listed here.",
    }  # fmt: skip
    depends = {"ref": name, "dependsOn": ["base", *(one["bom-ref"] for one in found["components"])]}
    return {
        **found,
        "metadata": {**found["metadata"], "component": image},
        "components": [below, *found["components"]],
        "dependencies": [depends, *found["dependencies"]],
    }


def _text(file: str, document: Document) -> str:
    text = json.dumps(document, indent=1, sort_keys=True) + "\n"
    from cyclonedx.schema import SchemaVersion  # noqa: PLC0415 - two seconds, for grammars of other formats
    from cyclonedx.validation.json import JsonStrictValidator  # noqa: PLC0415 - the same

    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if problem is not None:
        raise ReleaseError(f"{file} is not valid CycloneDX 1.6: {problem}")
    return text
