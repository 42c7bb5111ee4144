"""docs/techniques.md is what `make techniques` makes, each example is described, and mistakes in it are named."""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from support import ROOT
from support.recipes import techniques
from support.recipes.recorded import UndeclaredFigure, record
from support.recipes.techniques import BadRecipe

FOLDERS = sorted({file.parent.name for kind in ("*.py", "*.toml") for file in (ROOT / "examples").glob(f"*/{kind}")})
DESCRIBED = """\
title = "A title"
technique = "a technique"
property = "a property"
recovers = "in process"
tests = ["tests/recipes/test_one.py::test_it"]
figures = ["share", "idle"]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "examples" / "one").mkdir(parents=True)
    (tmp_path / "examples" / "one" / "recipe.toml").write_text(DESCRIBED)
    return tmp_path


def test_the_page_is_what_the_generator_makes() -> None:
    assert (ROOT / techniques.PAGE).read_text() == techniques.page(ROOT), "run `make techniques`, and commit its result"


@pytest.mark.parametrize("name", FOLDERS)
def test_an_example_has_its_description_readme_and_tests(name: str) -> None:
    folder = ROOT / "examples" / name
    assert (folder / "README.md").exists(), f"examples/{name} has no README.md"
    assert (folder / "recipe.toml").exists(), (
        f"examples/{name} has no recipe.toml: see tests/support/recipes/techniques.py"
    )
    for test in techniques.read_recipe(folder / "recipe.toml").tests:
        file, _, function = test.partition("::")
        assert (ROOT / file).exists(), f"examples/{name}/recipe.toml names {file}, which does not exist"
        assert f"def {function}(" in (ROOT / file).read_text(), f"{file} has no {function}"


JOBS = sorted(file.parent.name for file in (ROOT / "examples").glob("*/job.yaml"))
OWN_IMAGE = {"deepspeed": "deepspeed"}  # made from the image `examples`
INSTALLED_AS = {"sklearn": "scikit-learn"}  # by what a script imports, where the package has another name


@pytest.mark.parametrize("name", JOBS)
def test_the_image_of_an_example_has_its_folder_and_what_it_imports(name: str) -> None:
    folder = ROOT / "examples" / name
    job = yaml.safe_load((folder / "job.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    target = OWN_IMAGE.get(name, "examples")
    assert container["image"] == f"everstep/{target}:dev"
    assert container["workingDir"] == f"/workspace/{name}"
    said = [part for part in container["command"] if part.endswith(".py")]
    assert said
    assert all((folder / part).exists() for part in said), f"examples/{name} does not have {said}"
    worker = tomllib.loads((ROOT / "worker" / "pyproject.toml").read_text())["project"]
    stages = (ROOT / "Dockerfile").read_text().partition(" AS examples\n")[2]
    stage = stages if target != "examples" else stages.partition("FROM ")[0]
    there = {
        re.split(r"[<>=~!]", wanted)[0]
        for wanted in [*worker["optional-dependencies"]["worker"], *re.findall(r"'([^']+)'", stage)]
    }
    for installed in re.findall(r"pip install .*--no-deps.*", stage):
        there |= set(re.findall(r"/wheels/(everstep_\w+)-", installed))
    own = {file.stem for file in folder.glob("*.py")} | {"everstep", "horovod"}  # a name of everstep_horovod
    known = own | set(sys.stdlib_module_names)
    missing = {module for module in imported(folder) - known if INSTALLED_AS.get(module, module) not in there}
    assert not missing, f"the image examples of the Dockerfile does not install {', '.join(sorted(missing))}"


def imported(folder: Path) -> set[str]:
    """The first names of all modules that a folder's scripts import."""
    found = set()
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    return found


def test_a_measured_figure_reaches_the_page_with_date_and_commit(project: Path) -> None:
    record("one", "share", 0.16667, "of the bytes", expected=1 / 6, under=project)
    found = techniques.recipes(project)
    newest = techniques.renewed({"gone": {}, "one": {"old": {}, "share": {"value": 9}}}, found, project)
    assert newest.keys() == {"one"}
    assert newest["one"].keys() == {"share"}, "figures that no recipe names any more are left out"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", newest["one"]["share"]["date"])
    assert newest["one"]["share"]["commit"]
    (project / techniques.RESULTS).write_text(json.dumps(newest))
    made = techniques.page(project)
    assert "share: 0.167 of the bytes (theory: 0.167)<br>idle: not measured" in made


def test_a_figure_that_its_recipe_does_not_name_is_refused(project: Path) -> None:
    with pytest.raises(UndeclaredFigure, match=r'one/recipe.toml does not name the figure "bytes": add it'):
        record("one", "bytes", 1, "B", under=project)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('recovers = "somehow"', "`recovers` is 'somehow'; it can be 'in process'"),
        ('title = ""', "`title` is missing, empty"),
        ('tests = "one"', "`tests` is missing, empty, or no list"),
        ('provs = "much"', "unknown provs; known: title"),
    ],
)
def test_a_mistake_in_a_description_is_named(project: Path, line: str, message: str) -> None:
    file = project / "examples" / "one" / "recipe.toml"
    key = line.partition(" ")[0]
    kept = [old for old in DESCRIBED.splitlines() if not old.startswith(key + " ")]
    file.write_text("\n".join([*kept, line]))
    with pytest.raises(BadRecipe, match=re.escape(message)):
        techniques.recipes(project)
