"""docs/reference/support.md says of no version more than the tests show."""

from __future__ import annotations

import re
import sys
import tomllib
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from release import environments, manifests, versions
from support import ROOT
from testcluster import versions as built

PAGE = (ROOT / "docs/reference/support.md").read_text()
ROWS = {row[0]: row[1:] for row in re.findall(r"^\| ([\w ]+) \| (.*?) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)}


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+\.\d+", text)


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def project(folder: str) -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"])


def test_python_that_is_proven_is_the_one_that_runs_the_tests() -> None:
    asked, proven, unproven = ROWS["Python"]
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert numbers(proven) == [environments.IMAGE_PYTHON]
    assert running in numbers(proven), f"the tests run on Python {running}: say so on the page"
    for folder in versions.DISTRIBUTIONS.values():
        allowed = SpecifierSet(str(project(folder)["requires-python"]))
        assert numbers(asked) == [str(min(Version(one) for one in numbers(asked + proven + unproven)))]
        assert all(one in allowed for one in numbers(asked + proven + unproven))
        classifiers = re.findall(r"'Programming Language :: Python :: (3\.\d+)'", str(project(folder)["classifiers"]))
        assert classifiers == numbers(proven), "a classifier is a claim too"


def test_pytorch_that_is_proven_is_the_one_that_is_asked_for() -> None:
    asked, proven, _ = ROWS["PyTorch"]
    extras = project("worker")["optional-dependencies"]
    (line,) = [one for one in extras["worker"] if one.startswith("torch")]
    assert numbers(asked) == numbers(proven)[:1]
    assert all(f"{one}.0" in Requirement(line).specifier for one in numbers(asked))


def test_kubernetes_and_helm_that_are_proven_are_those_that_the_tests_start() -> None:
    asked, proven, unproven = ROWS["Kubernetes"]
    own, *of_the_night = numbers(proven)
    assert own == minor(built.KUBERNETES)
    assert set(of_the_night) <= {minor(version) for version in built.RANGE}, "the two servers of the night"
    known = {Version(one) for one in (own, *of_the_night, *numbers(unproven))}
    assert (min(known), max(known)) == tuple(Version(minor(version)) for version in built.RANGE)
    least = yaml.safe_load((ROOT / manifests.CHART / "Chart.yaml").read_text())["kubeVersion"]
    assert f">={numbers(asked)[0]}.0-0" == least
    assert not set(numbers(proven)) & set(numbers(unproven.partition(";")[0])), "kubelets are another matter"
    assert numbers(ROWS["Helm"][1]) == [minor(built.HELM)]


@pytest.mark.parametrize("name", environments.ARCHITECTURES)
def test_architecture_that_a_release_looks_for_wheels_of_is_on_the_page(name: str) -> None:
    asked, proven, unproven = ROWS["machines"]
    assert name in asked
    assert (name in proven) != (name in unproven)


# --- how to install


REMEDY = re.compile(r"pip install (?!--no-index)(?:[^\n]*?['\"` ])?(everstep[\w-]*)(?![\w/.-]|\[)")


def test_no_text_tells_to_install_a_name_that_is_not_ours_at_the_package_index() -> None:
    """An extra of what is installed is another matter: pip takes only other people's packages for it."""
    assert REMEDY.findall("pip install everstep-local 'everstep[worker]'") == ["everstep-local"]
    assert not REMEDY.search("pip install 'everstep[worker]' './worker[s3]' /wheels/everstep-*.whl")
    files = [
        path
        for folder in (*versions.DISTRIBUTIONS.values(), "docs", "examples", "charts", "tools")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".txt", ".toml", ".yaml")
    ]
    assert len(files) > 500
    wrong = [path for path in (*files, *ROOT.glob("*.md")) if REMEDY.search(path.read_text())]
    assert wrong == [], "everstep.installing has the words, docs/how-to-install.md the way"
