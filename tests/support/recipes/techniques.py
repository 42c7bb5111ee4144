"""Writes docs/techniques.md: what each recipe of examples/ proves, with its measured figures.

`make techniques` runs this script. A recipe describes itself in examples/<name>/recipe.toml. Its tests leave figures in
.everstep/recipes (recorded.py). The script copies them into examples/results.json, which is committed, and writes the
page from both.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import ROOT

WAYS = ("in process", "forked again", "from the newest commit", "from the library's checkpoint")
PAGE, RESULTS = Path("docs/techniques.md"), Path("examples/results.json")
REQUIRED = {"title": str, "technique": str, "property": str, "recovers": str, "tests": list}
OPTIONAL = {"otherwise": str, "figures": list}
HEAD = """\
# Techniques

Each row is a recipe in `examples/`: a script, a job for the cluster, and tests that kill a worker and measure the
property. `make techniques` writes this page from `examples/*/recipe.toml` and `examples/results.json`.

| after a loss | what happens |
|---|---|
| in process | The other workers keep their processes and their memory. A new process gets the state from one of them. |
| forked again | The workers of the lost one's replica are started again. They get the state from another replica. |
| from the newest commit | All workers load the newest commit from storage. |
| from the library's checkpoint | All workers start again and load the newest checkpoint that the library has written. |

Figures were measured on CPUs with gloo unless they say otherwise. The date and commit of each are in
`examples/results.json`. A plus sign behind a commit means that files differed from it.

| recipe | technique | property that a test asserts | after a loss | measured |
|---|---|---|---|---|
"""


class BadRecipe(Exception):
    """A recipe.toml says something that the page cannot show."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What examples/<name>/recipe.toml says. `tests` are pytest's names of them, from the root of the repository."""

    name: str
    title: str
    technique: str
    property: str
    recovers: str
    tests: tuple[str, ...]
    otherwise: str = ""
    figures: tuple[str, ...] = ()


def read_recipe(file: Path) -> Recipe:
    said = tomllib.loads(file.read_text())
    for key, kind in REQUIRED.items():
        if not isinstance(said.get(key), kind) or not said[key]:
            raise BadRecipe(f"{file}: `{key}` is missing, empty, or no {kind.__name__}")
    unknown = said.keys() - REQUIRED.keys() - OPTIONAL.keys()
    if unknown:
        raise BadRecipe(f"{file}: unknown {', '.join(sorted(unknown))}; known: {', '.join([*REQUIRED, *OPTIONAL])}")
    if said["recovers"] not in WAYS:
        raise BadRecipe(f"{file}: `recovers` is {said['recovers']!r}; it can be {', '.join(map(repr, WAYS))}")
    lists = {key: tuple(said.get(key, ())) for key in ("tests", "figures")}
    return Recipe(name=file.parent.name, **(said | lists))


def recipes(root: Path) -> list[Recipe]:
    return [read_recipe(file) for file in sorted(root.glob("examples/*/recipe.toml"))]


def results(root: Path) -> dict[str, dict[str, Any]]:
    file = root / RESULTS
    return json.loads(file.read_text()) if file.exists() else {}


def renewed(known: Mapping[str, Mapping[str, Any]], found: list[Recipe], root: Path) -> dict[str, dict[str, Any]]:
    """`known` results with those of the last runs over them, without figures that no recipe names any more."""
    newest = {recipe.name: dict(known.get(recipe.name, {})) for recipe in found}
    for file in sorted((root / ".everstep" / "recipes").glob("*.json")):
        measured = json.loads(file.read_text())
        newest.setdefault(measured.pop("recipe"), {})[measured.pop("figure")] = measured
    return {
        recipe.name: {figure: newest[recipe.name][figure] for figure in recipe.figures if figure in newest[recipe.name]}
        for recipe in found
    }


def page(root: Path) -> str:
    found, measured = recipes(root), results(root)
    rows = [_row(recipe, measured.get(recipe.name, {})) for recipe in found]
    proofs = ["\n## Tests\n\n", "| recipe | tests |\n|---|---|\n", *map(_tests, found)]
    return HEAD + "".join([*rows, *proofs])


def _row(recipe: Recipe, measured: Mapping[str, Any]) -> str:
    after = f"{recipe.recovers}; {recipe.otherwise}" if recipe.otherwise else recipe.recovers
    figures = "<br>".join(f"{name}: {_shown(measured.get(name))}" for name in recipe.figures) or "–"
    link = f"[{recipe.name}](../examples/{recipe.name}/README.md): {recipe.title}"
    return f"| {link} | {recipe.technique} | {recipe.property} | {after} | {figures} |\n"


def _shown(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return "not measured"
    theory = "" if figure["expected"] is None else f" (theory: {_number(figure['expected'])})"
    return f"{_number(figure['value'])} {figure['unit']}".rstrip() + theory


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _tests(recipe: Recipe) -> str:
    return f"| {recipe.name} | {'<br>'.join(f'`{test}`' for test in recipe.tests)} |\n"


def main() -> None:
    newest = renewed(results(ROOT), recipes(ROOT), ROOT)
    (ROOT / RESULTS).write_text(json.dumps(newest, indent=1, ensure_ascii=False) + "\n")
    (ROOT / PAGE).write_text(page(ROOT))
    print(f"{PAGE} and {RESULTS} are written from {len(newest)} recipes")


if __name__ == "__main__":
    main()
