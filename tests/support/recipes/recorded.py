"""Keeps the figures that tests of recipes measure, for `make techniques`, which publishes them in docs/techniques.md.

Each figure has a file of its own in .everstep/recipes, so that tests may run side by side.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import subprocess
import tomllib
from pathlib import Path

from support import ROOT

EXAMPLES = ROOT / "examples"


class UndeclaredFigure(AssertionError):
    """A test measures what its recipe does not name, so that the figure would never be shown."""


def record(
    recipe: str, figure: str, value: float, unit: str, expected: float | None = None, under: Path = ROOT
) -> None:
    """Keeps what a test has measured: `figure` is one of `figures` in examples/RECIPE/recipe.toml; `expected` is what
    theory says of it."""
    description = under / "examples" / recipe / "recipe.toml"
    if figure not in tomllib.loads(description.read_text()).get("figures", []):
        raise UndeclaredFigure(f'{description} does not name the figure "{figure}": add it to its `figures`')
    found = {"recipe": recipe, "figure": figure, "value": value, "unit": unit, "expected": expected}
    found |= {"date": datetime.date.today().isoformat(), "commit": _commit()}
    folder = under / ".everstep" / "recipes"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{recipe}-{hashlib.sha256(figure.encode()).hexdigest()[:12]}.json"
    written = file.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    written.replace(file)


def _commit() -> str:
    """The checked-out commit; with a plus sign where files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=10"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
