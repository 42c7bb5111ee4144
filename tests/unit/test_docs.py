"""What the docs point at exists: tests by name, files and links."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from everstep.membership.backends.configuration import Configuration
from everstep.membership.joining import JoinSettings
from everstep_operator.rounds.presence import LEASE

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMED = re.compile(
    r"`((?:tests|worker|operator|local|horovod|sources|benchmarks|charts|tools)/[\w/.-]+)(?:::([^`]*))?`"
)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
ANCHORED = re.compile(r"\]\((?!https?://)([^)#]*)#([^)]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
TODAY = re.compile(r"^\| \*\*(.+?)\*\* \|.*In the code: (.*)\|$", re.MULTILINE)


def test_lease_that_the_docs_and_figures_are_about_is_the_default() -> None:
    ttl = Configuration(()).ttl
    assert JoinSettings().ttl == LEASE == ttl
    assert f"| `ttl` | {ttl:g} |" in (ROOT / "docs/reference/rendezvous.md").read_text()
    ours = [way for way in _ways() if way.module == "everstep.agent.main"]
    assert ours
    assert not any("ttl" in way.conf for way in ours), "the benchmark's figures are those of the default"


def _ways() -> Any:
    script = ROOT / "benchmarks/recovery.py"
    before = sys.path[:]
    try:
        return runpy.run_path(str(script))["WAYS"]
    finally:
        sys.path[:] = before


def names_in(path: Path) -> set[str]:
    """What a module defines: constants, functions, classes; and methods, with their class before them or without."""
    module = ast.parse(path.read_text())
    names = set[str]()
    for statement in module.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.add(statement.target.id)
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(f"{node.name}.{part.name}")
                elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    names.add(f"{node.name}.{part.target.id}")
    return names


def test_names_of_a_module_are_those_that_it_defines(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    pod = "class Pod:\n    name: str\n    async def run(self): ...\n"
    module.write_text(f"LIMIT: int = 3\nWAIT = 2\n{pod}def plan(): unused = 1\n")
    assert names_in(module) == {"LIMIT", "WAIT", "Pod", "Pod.name", "Pod.run", "run", "plan"}


def test_each_row_of_where_a_change_goes_names_a_file_to_begin_at() -> None:
    _, _, section = (ROOT / "docs/architecture.md").read_text().partition("\n## Where a change goes\n")
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    assert not [row[0] for row in rows if len(row) != 3 or not any("." in file for file, _ in NAMED.findall(row[1]))]


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_tests_files_and_links_that_a_document_names_exist(path: Path) -> None:
    text = path.read_text()
    missing = []
    for file, name in NAMED.findall(text):
        if not (ROOT / file).exists() or (name and name not in names_in(ROOT / file)):
            missing.append(f"{file}::{name}" if name else file)
    missing += [link for link in LINK.findall(CODE.sub("", text)) if not (path.parent / link).exists()]
    assert not missing


def anchors(path: Path) -> set[str]:
    """Of a page's headings, as GitHub and its like make them."""
    found, seen = set[str](), Counter[str]()
    for title in HEADING.findall(FENCED.sub("", path.read_text())):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_headings_that_a_document_links_to_exist(path: Path) -> None:
    text = CODE.sub("", FENCED.sub("", path.read_text()))
    links = [(page, anchor) for page, anchor in ANCHORED.findall(text) if not page or page.endswith(".md")]
    missing = [(page, anchor) for page, anchor in links if anchor not in anchors(path.parent / page if page else path)]
    assert not missing


def test_words_that_troubleshooting_tells_to_look_for_are_printed_somewhere() -> None:
    printed = [path.read_text() for path in (ROOT / "tests/unit/transcripts").rglob("*.txt")]
    printed += [
        path.read_text()
        for folder in ("operator", "worker", "local", "horovod", "sources")
        for path in (ROOT / folder).rglob("*.py")
    ]
    corpus = "\n".join([*printed, (ROOT / "manifests/crd.yaml").read_text()])
    lines = (ROOT / "docs/how-to-troubleshoot.md").read_text().splitlines()
    seen = [row[1] for row in (line.split(" | ") for line in lines if line.startswith("|")) if len(row) == 4]
    words = [word for cell in seen for word in re.findall(r"`([^`]+)`", cell) if not word.startswith("kubectl")]
    assert len(words) > 25
    assert [word for word in words if word not in corpus] == []


def test_names_that_the_glossary_gives_for_the_code_are_in_the_code() -> None:
    """A name that was renamed is to leave the glossary with it."""
    code = "\n".join(
        path.read_text()
        for folder in ("operator", "worker", "local", "horovod", "sources")
        for path in (ROOT / folder).rglob("*.py")
    )
    names = set(re.findall(r"\w+", code))
    given = [
        (word, name)
        for word, names_of_word in TODAY.findall((ROOT / "docs/glossary.md").read_text())
        for name in re.findall(r"`(\w+)`", names_of_word)
    ]
    assert given
    assert not [(word, name) for word, name in given if name not in names]
