"""What the docs point at exists: tests by name, files and links."""

from __future__ import annotations

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
NAMED = re.compile(r"`((?:tests|worker|operator|horovod|sources|benchmarks)/[\w/.]+\.(?:py|txt))(?:::(\w+))?`")
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


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_tests_files_and_links_that_a_document_names_exist(path: Path) -> None:
    text = path.read_text()
    missing = []
    for file, name in NAMED.findall(text):
        found = ROOT / file
        if not found.exists() or (name and f"def {name}(" not in found.read_text()):
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
